"""`Stage`: one stage under torch's schedule runtime.

torch's own ``PipelineStage`` runs a module whose inputs and outputs have fixed shapes. Here each microbatch has its
own shapes, several tensors cross, some of them only pass through, and which of them get a gradient is known before
(`nbtrain.parallel.pipeline.passage`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.stage import _PipelineStageBase

from nbtrain.errors import ModelError
from nbtrain.events import EventKind
from nbtrain.parallel.messages import Messages
from nbtrain.parallel.pipeline.flow import Blanks, Flow
from nbtrain.parallel.pipeline.graph import eager
from nbtrain.parallel.pipeline.passage import Microbatch, Passage
from nbtrain.parallel.pipeline.score import Meta, Value
from nbtrain.parallel.tensor.random import Draws
from nbtrain.parallel.waits import waited
from nbtrain.telemetry.timeline import recorder


@dataclass
class _Graph:
    """What a forward leaves for its backward."""

    inputs: dict[Value, torch.Tensor]
    outputs: dict[Value, torch.Tensor]
    root: torch.Tensor | None
    groups: list[dict[str, Any]] | None = None


@dataclass
class _Boxes:
    """Tensors between actions, by microbatch."""

    received: dict[int, dict[Value, torch.Tensor]] = field(default_factory=dict)
    sent: dict[int, dict[Value, torch.Tensor]] = field(default_factory=dict)
    gradients: dict[int, dict[Value, torch.Tensor]] = field(default_factory=dict)
    returned: dict[int, dict[Value, torch.Tensor]] = field(default_factory=dict)
    graphs: dict[int, _Graph] = field(default_factory=dict)


class Stage(_PipelineStageBase):
    """One stage on the rank that holds it.

    Args:
        index: In ``range(num_stages)``.
        num_stages: Of the pipeline.
        device: Where it computes.
        group: The pipeline ranks.
        parameters: Gives what backward splits off, as forward used it.
        settle_weights: Called behind a backward of weights alone.
        units: Of the model, by name.
        blanks: For what other stages compute.
        draws: What random numbers come from.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        parameters: Callable[[], list[nn.Parameter]],
        settle_weights: Callable[[], None],
        units: Mapping[str, nn.Module],
        blanks: Blanks,
        draws: Draws | None,
    ) -> None:
        # torch looks at a module only to find out whether it is DDP or FSDP, which are no matter of a stage here
        super().__init__(nn.Identity(), index, num_stages, device, group)
        self._parameters, self._settle_weights = parameters, settle_weights
        self._units, self._blanks, self._draws = units, blanks, draws
        self._boxes = _Boxes()
        self._microbatches: Sequence[Microbatch] = ()
        self._sent: list[tuple[str, int, int, list[dist.Work]]] = []  # what, microbatch, to which stage
        self._num_waits = self._tag = 0
        self._messages: Messages | None = None

    def begin(self, microbatches: Sequence[Microbatch], messages: Messages, kind: str, *, backward: bool) -> None:
        """Before a run of the schedule, which ``messages`` are of; ``kind`` tells pipelines apart."""
        self._microbatches, self._boxes = microbatches, _Boxes()
        self._messages, self._tag = messages, messages.tag((kind, backward))
        self._sent.clear()
        self.chunks = len(microbatches)
        self.has_backward = backward

    def _passage(self, microbatch: int) -> Passage:
        return self._microbatches[microbatch].passages[self.stage_index]

    # forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        passage = self._passage(fwd_chunk_id)
        self._boxes.received[fwd_chunk_id] = self._buffers(passage, passage.incoming)
        return self._receives(self._boxes.received[fwd_chunk_id].values(), self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._boxes.received[mb_index] = {value: tensor.detach() for value, tensor in prev_stage_outputs.items()}

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> dict[Value, torch.Tensor]:
        """What later stages read: also what is only passed on."""
        microbatch, passage = self._microbatches[fwd_chunk_id], self._passage(fwd_chunk_id)
        received = self._boxes.received.pop(fwd_chunk_id, {})
        if self.has_backward:
            for value in passage.returning:
                received[value].requires_grad_()
        draws = self._draws if passage.score.random else None
        # code outside of units writes into some again: what is passed on must stay as it came
        written = passage.score.written
        handed = {value: _hand(one.clone() if value in written else one) for value, one in received.items()}
        versions = {value: tensor._version for value, tensor in handed.items()}
        flow = Flow(
            passage.score,
            self._units,
            passage.first,
            passage.end,
            handed,
            passage.given,
            self._blanks,
            draws,
            microbatch.index,
        )
        with microbatch.watched(), self._span(EventKind.FORWARD, fwd_chunk_id):
            root = microbatch.forward(flow)
        outputs = {value: self._output(value, flow.given, passage) for value in passage.given}
        # what a unit has written into goes on as it is now
        changed = [value for value in passage.relayed if handed[value]._version != versions[value]]
        outputs |= {value: handed[value] for value in changed if value not in written}
        if self.has_backward:
            self._boxes.graphs[fwd_chunk_id] = _Graph(received, outputs, root)
        passed = {value: received[value] for value in passage.relayed}
        sent = {value: (passed | outputs)[value].detach() for value in passage.outgoing}
        next_rank = self.stage_index_to_group_rank.get(self.stage_index + 1)
        if next_rank not in (None, self.group_rank):  # else torch hands on what is returned
            self._boxes.sent[fwd_chunk_id] = sent
        return sent

    def _output(self, value: Value, given: Mapping[Value, torch.Tensor], passage: Passage) -> torch.Tensor:
        tensor, meta = given.get(value), passage.meta(value)
        unit = passage.score.calls[value.call].unit
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != meta.shape:
            got = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else f"{tensor!r}"
            raise ModelError(
                f"'{unit}' gives {got}, and the next stage expects shape {meta.shape}: what crosses between stages "
                "must have shapes that depend on the shapes of the inputs only; type pp=1"
            )
        return meta.laid_out(tensor)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("activations", fwd_chunk_id, self._boxes.sent.pop(fwd_chunk_id), self.stage_index + 1)

    # backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        passage = self._passage(bwd_chunk_id)
        self._boxes.gradients[bwd_chunk_id] = self._buffers(passage, passage.awaited)
        return self._receives(self._boxes.gradients[bwd_chunk_id].values(), self.stage_index + 1)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self._boxes.gradients[mb_index] = next_stage_bwd_outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        microbatch, passage = self._microbatches[bwd_chunk_id], self._passage(bwd_chunk_id)
        graph = self._boxes.graphs.pop(bwd_chunk_id)
        arrived = self._boxes.gradients.pop(bwd_chunk_id, {})
        roots, gradients = self._roots(graph, arrived)
        inputs = {value: graph.inputs[value] for value in passage.returning}
        kind = EventKind.BACKWARD if full_backward else EventKind.BACKWARD_INPUT
        with microbatch.watched(), _unwrapped(), self._span(kind, bwd_chunk_id):
            if full_backward or microbatch.whole_backward or not roots:
                found = self._backward(roots, gradients, list(inputs.values()))
            else:
                found, graph.groups = self._backward_of_inputs(roots, gradients, list(inputs.values()))
        relayed = {value: gradient for value, gradient in arrived.items() if value not in graph.outputs}
        self._boxes.returned[bwd_chunk_id] = {
            value: self._gradient(passage.meta(value), gradient, relayed.get(value))
            for value, gradient in zip(inputs, found, strict=True)
        }
        if not full_backward:
            self._boxes.graphs[bwd_chunk_id] = _Graph({}, {}, None, graph.groups)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        groups = self._boxes.graphs.pop(bwd_chunk_id).groups
        with _unwrapped(), self._span(EventKind.BACKWARD_WEIGHT, bwd_chunk_id):
            if groups is not None:
                stage_backward_weight(iter(self._parameters()), groups)
                self._settle_weights()

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return self._boxes.returned.pop(mb_index)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send("gradients", bwd_chunk_id, self._boxes.returned.pop(bwd_chunk_id), self.stage_index - 1)

    def _roots(
        self, graph: _Graph, arrived: Mapping[Value, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        if self.is_last:
            return ([], []) if graph.root is None else ([graph.root], [torch.ones_like(graph.root)])
        trained = [value for value, tensor in graph.outputs.items() if tensor.requires_grad and value in arrived]
        return [graph.outputs[value] for value in trained], [arrived[value] for value in trained]

    def _backward(
        self, roots: list[torch.Tensor], gradients: list[torch.Tensor | None], inputs: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        return stage_backward(roots, gradients, inputs) if roots else [None] * len(inputs)

    def _backward_of_inputs(
        self, roots: list[torch.Tensor], gradients: list[torch.Tensor | None], inputs: list[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor | None], list[dict[str, Any]] | None]:
        """Gradients of ``inputs``, and where those of weights start from; None where all of them have come along."""
        # torch detaches them in place: what the stage has saved of them, views and parameters must not be
        roots, weights = [_hand(root) for root in roots], self._parameters()
        early = eager(roots, inputs, weights)
        known = {id(weight) for weight in early}
        late = [weight for weight in weights if id(weight) not in known]
        if not late or not inputs:
            return self._backward(roots, gradients, inputs), None
        found, groups = stage_backward_input(roots, cast(Any, gradients), [*inputs, *early], iter(late))
        self._settle_weights()
        return found[: len(inputs)], groups

    def _gradient(self, meta: Meta, found: torch.Tensor | None, back: torch.Tensor | None) -> torch.Tensor:
        """Of what was received: what this stage adds and, where it was passed on, what came back."""
        if found is None:
            return meta.empty(self.device).zero_() if back is None else back
        return meta.laid_out(found if back is None else found + back)

    def _span(self, kind: EventKind, microbatch: int, name: str = "") -> AbstractContextManager[None]:
        return recorder().span(kind, self.stage_index, microbatch, name)

    # messages

    def _buffers(self, passage: Passage, values: Sequence[Value]) -> dict[Value, torch.Tensor]:
        return {value: passage.meta(value).empty(self.device) for value in values}

    def _receives(self, tensors: Iterable[torch.Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[stage]
        return [
            dist.P2POp(dist.irecv, _on_wire(tensor), group=self.group, tag=self._tag, group_peer=peer)
            for tensor in tensors
            if tensor.numel()
        ]

    def _send(self, what: str, microbatch: int, tensors: Mapping[Value, torch.Tensor], stage: int) -> list[dist.P2POp]:
        """Begins to send, here and not in torch's runtime: so that it is known who waits for what to be taken."""
        peer = self.stage_index_to_group_rank[stage]
        with self._span(EventKind.SEND, microbatch, what):
            works = [
                dist.isend(_on_wire(tensor), group=self.group, tag=self._tag, group_dst=peer)
                for tensor in tensors.values()
                if tensor.numel()
            ]
        self._sent.append((what, microbatch, stage, self.kept(works)))
        return []

    def kept(self, works: Iterable[dist.Work | None]) -> list[dist.Work]:
        """Of this run, until it ends."""
        assert self._messages is not None, "a run has begun"
        found = [work for work in works if work is not None]
        self._messages.keep(found)
        return found

    def finish_sends(self, is_taken: Callable[[str, int, int], bool] = lambda *_: True) -> None:
        """Waits until what was sent is taken.

        Args:
            is_taken: Of which messages, by what they carry, stage and microbatch.
        """
        sent, self._sent = self._sent, []
        for what, microbatch, stage, works in sent:
            if is_taken(what, stage, microbatch):
                self.wait("send", what, microbatch, stage, works)
            else:
                self._sent.append((what, microbatch, stage, works))

    def wait(self, op: str, what: str, microbatch: int, other: int, works: Sequence[dist.Work]) -> None:
        """Waits for messages to or from stage ``other``; meanwhile `nbtrain.parallel.waits` tells it."""
        assert self.group is not None, "stages are on ranks"
        assert self._messages is not None, "a run has begun"
        own, peer = dist.get_rank(), dist.get_global_rank(self.group, self.stage_index_to_group_rank[other])
        self._num_waits += 1
        number = self._microbatches[microbatch].index
        told = (
            f"the {op} of microbatch {number}'s {what}, stage {self.stage_index} "
            f"{'from' if op == 'receive' else 'to'} stage {other} on rank {peer}"
        )
        name = f"{self.group.group_name}/{op} {own}-{peer}"
        with waited(op, name, sorted((own, peer)), self._num_waits, (), time.time(), told):
            self._messages.wait(works)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Gradients are reduced behind the schedule."""

    def clear_runtime_states(self) -> None:
        self._microbatches, self._boxes, self._messages = (), _Boxes(), None
        self._sent.clear()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("shapes are found by a rehearsal")

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("shapes are found by a rehearsal")

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        raise NotImplementedError("shapes are found by a rehearsal")


class _Hand(torch.autograd.Function):
    """Identity whose output is no leaf, no view and nothing that was saved: it may be written into or detached."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _hand(tensor: torch.Tensor) -> torch.Tensor:
    handed: torch.Tensor = _Hand.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return handed


def _on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """All of its memory in one dimension: gloo sends neither strides nor truth values nor complex numbers."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    return torch.view_as_real(flat) if flat.is_complex() else flat


@contextmanager
def _unwrapped() -> Iterator[None]:
    """torch wraps what a backward raises into an error that prints tensors."""
    try:
        yield
    except RuntimeError as problem:
        if problem.__cause__ is None:
            raise
        raise problem.__cause__ from None
