"""`ShardedUpdate`: the weight update sharded over the data-parallel ranks, ``zero=1``.

Automatic Cross-Replica Sharding of Weight Update (arXiv 2004.13336), which is ZeRO's first stage (arXiv 1910.02054)::

    backward        a bucket's gradients are there -> reduce-scatter over dp_shard begins, bucket after bucket
    its end         all buckets are waited for; with replicas: all-reduce of this rank's part over dp_replicate
    optimizer       steps on this rank's pieces, which are views of the weights
    gather          all-gather of the weights, in place

Weights and gradients are whole on each rank, optimizer state is not. It moves what an all-reduce moves, and the update
costs 1/N. Without a Trainer (no optimizer was given to `take_over`) the gradients are gathered in the weights' stead:
an own loop's optimizer steps on everything, as under DDP.

An interrupt or a death between the optimizer's step and the end of the gather leaves every rank with its own new
pieces and some old ones of others. So weights are `owed` from the step until they are gathered. The gather isn't
interruptible; where it fails because a rank died, groups are formed again, the ranks agree on what is owed, a newcomer
gets its pieces from a replica, and whatever needs the weights next gathers again, which sends nothing but pieces that
are new. Pieces of a dead rank without a replica or mirror are lost: its optimizer state always, its weights
where they were owed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from nbtrain.errors import OptimizerError, UsageError
from nbtrain.parallel.bucket import Bucket, Placement, dealt, in_buckets, side_by_side
from nbtrain.parallel.exchange import Finish, begin_all_gather, begin_reduce_scatter, part
from nbtrain.parallel.mesh import data_mesh
from nbtrain.parallel.messages import begin_round
from nbtrain.parallel.replicate import Replica
from nbtrain.parallel.usage import Usage


class ShardedUpdate(Replica):
    """`Replica` whose optimizer steps on this rank's pieces.

    Args:
        model: On its device, with the same weights on every rank. Its parameters become views of flat buffers.
        mesh: With ``dp_shard``, whose ranks share the update, and ``dp_replicate``.
        bucket_mb: Size of a bucket in MiB; None takes torch's 25.

    Attributes:
        owed: Whether pieces were stepped and not yet gathered.
        shares: Whether an optimizer was taken over.
        whole: Whether each parameter lies in one part.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, bucket_mb: float | None = None) -> None:
        super().__init__(model)
        self._mesh = mesh
        self._bucket_mb = bucket_mb
        self.owed = self.shares = False
        self._is_reducing = True
        self._is_open = False  # whether a backward of an own loop has begun to reduce
        self._begun: list[Finish] = []
        self._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
        self.usage = _PieceUsage(self._trained, self)
        self.arrange(whole=False)

    def arrange(self, *, whole: bool) -> None:
        """Lays the parameters into buckets.

        Args:
            whole: Each parameter in one part, in one bucket a dtype; else parts cut parameters, and buckets are filled
                in the order in which gradients arrive.
        """
        group, self.whole = self.shard_group, whole
        cuts = in_buckets(self._trained, float("inf") if whole else self._bucket_mb)
        self._buckets = [Bucket(cut, _placed(cut, group.size(), whole), group.size(), group.rank()) for cut in cuts]
        places = {
            id(parameter): (bucket, index)
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        }
        self._places = [places[id(parameter)] for parameter in self._trained]

    def take_over(self, optimizer: Optimizer, *, whole: bool) -> None:
        """Makes ``optimizer`` step on this rank's pieces. Its groups and options stay.

        Args:
            optimizer: Of the model's parameters, without state, or of the pieces.
            whole: Whether it needs whole parameters.

        Raises:
            OptimizerError: An earlier optimizer steps on pieces of another kind.
        """
        if whole != self.whole:
            if self.shares:
                raise OptimizerError(
                    f"{type(optimizer).__name__} needs {'whole parameters' if whole else 'no whole parameters'}, and "
                    "the model's first optimizer does not; make the model again for another optimizer"
                )
            self.arrange(whole=whole)
        self.shares = True
        self.claim(optimizer)

    def claim(self, optimizer: Optimizer) -> None:
        """Puts pieces in the place of parameters, as ``add_param_group`` may have given some since.

        Raises:
            OptimizerError: It steps on their pieces already.
        """
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        pieces = {id(parameter): piece for parameter, piece in self._pairs()}
        twice = {id(pieces[id(parameter)]) for parameter in held if id(parameter) in pieces} & set(map(id, held))
        if twice:
            raise OptimizerError(
                f"add_param_group got {len(twice)} parameters that the optimizer has already; each may be in one group"
            )
        for group in optimizer.param_groups:
            group["params"] = [pieces.get(id(parameter), parameter) for parameter in group["params"]]

    def standing(self) -> tuple[bool, bool, bool]:
        """What a rank that takes a lost one's place must begin with: `stand` takes it."""
        return self.whole, self.shares, self.owed

    def stand(self, standing: tuple[bool, bool, bool]) -> None:
        """Before the weights come."""
        whole, self.shares, self.owed = standing
        if whole != self.whole:
            self.arrange(whole=whole)

    @torch.no_grad()
    def take_pieces(self, pieces: list[torch.Tensor]) -> None:
        """Copies in those of a lost rank, in the order of `named_pieces`; the other ranks are owed them."""
        for (_, own), piece in zip(self.named_pieces(), pieces, strict=True):
            own.copy_(piece)

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each trained parameter's piece under the parameter's name; of 0 elements where it lies on other ranks."""
        pieces = {id(parameter): piece for parameter, piece in self._pairs()}
        for name, parameter in self.module.named_parameters():
            if id(parameter) in pieces:
                yield name, pieces[id(parameter)]

    @property
    def gradient_bytes(self) -> int:
        """Of the buffers, which stay from step to step."""
        return sum(bucket.gradient_bytes for bucket in self._buckets)

    @property
    def num_adopted(self) -> int:
        """How often the data of a parameter was set from outside."""
        return sum(bucket.num_adopted for bucket in self._buckets)

    def is_used(self, index: int) -> bool:
        """Whether any rank used a parameter in the last step, by its number among those that train."""
        return not isinstance(self.usage, _PieceUsage) or index not in self.usage.unused

    def bucket_bytes(self) -> list[int]:
        return [bucket.weights.nbytes for bucket in self._buckets]

    def adopt(self) -> None:
        """Takes back parameters whose ``.data`` somebody has set. Moves nothing between ranks."""
        for bucket in self._buckets:
            bucket.adopt()

    def gather(self) -> None:
        """Gives every rank the weights that the others have stepped. Collective, where they are owed."""
        if not self.owed:
            return
        self._all_gather([bucket.weights for bucket in self._buckets])
        self.owed = False

    def gather_gradients(self) -> None:
        """Makes ``.grad`` of the parameters the last step's whole gradient, which no rank has otherwise. Collective."""
        self._all_gather([bucket.gradients for bucket in self._buckets])
        for (parameter, view), used in zip(self._shown(), self._used(), strict=True):
            parameter.grad = view if used else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reached.clear()
        self.gather()  # what an interruption has left owed
        if self._begun:
            self.unwrap()  # of an own loop, which goes on behind an exception
        if torch.is_grad_enabled():
            if self.joins:
                Join.notify_join_context(self)
            self.adopt()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_reducing = False
        try:
            yield
        finally:
            self._is_reducing = True

    def hold_back(self) -> None:
        """Before backwards whose gradients add up until `reduce`."""
        self.gather()
        if self._begun:
            self.unwrap()
        for bucket in self._buckets:
            bucket.adopt()
        self._is_reducing = False

    def reduce(self) -> None:
        """Reduces the gradients that are there. Collective."""
        self._is_reducing = True
        self._complete()

    def unwrap(self) -> None:
        self._is_reducing = True
        self._rest()

    def regroup(self, group: dist.ProcessGroup) -> None:
        vars(self).pop("_groups", None)
        self.unwrap()

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        for bucket in self._buckets:
            yield from zip(bucket.parameters, bucket.pieces, strict=True)

    def _shown(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for bucket in self._buckets:
            yield from bucket.show()

    def _used(self) -> Iterator[bool]:
        indices = {id(parameter): index for index, parameter in enumerate(self._trained)}
        for parameter, _ in self._pairs():
            yield self.is_used(indices[id(parameter)])

    def _syncs(self) -> bool:
        return self._is_reducing

    def _arrived(self, index: int) -> None:
        bucket, slot = self._places[index]
        bucket.take(slot)
        if self._is_reducing:
            self._open()
            bucket.waiting.discard(slot)
            self._begin()

    def _open(self) -> None:
        """Ranks number their exchanges alike again, where an exception has ended the last backward of an own loop; the
        steps of a Trainer do so by themselves."""
        if not (self._is_open or self.shares):
            begin_round([self.shard_group])
        self._is_open = True

    def _begin(self) -> None:
        """Begins to reduce the buckets that are full and have no unfinished one before them: the same on all ranks."""
        for bucket in self._buckets[len(self._begun) :]:
            if bucket.waiting:
                return
            self._begun.append(begin_reduce_scatter(bucket.gradients, self.shard_group))

    def _complete(self) -> None:
        """At the end of backward: what it did not reach counts as zeros; all buckets are reduced."""
        self._open()
        for bucket in self._buckets[len(self._begun) :]:
            bucket.complete()
        self._begin()
        for finish in self._begun:
            finish()
        self._average()
        if self.shares:
            for bucket in self._buckets:
                bucket.deal()
        else:
            self._all_gather([bucket.gradients for bucket in self._buckets])
            for parameter, view in self._shown():
                parameter.grad = view
        self._rest()

    def _average(self) -> None:
        parts = [part(bucket.gradients, self.shard_group) for bucket in self._buckets]
        replicas = self._replica_group
        if replicas.size() > 1:
            works = [dist.all_reduce(own, group=replicas, async_op=True) for own in parts]
            for work in works:
                work.wait()
        for own in parts:
            own.div_(self.shard_group.size() * replicas.size())

    def _all_gather(self, buffers: list[torch.Tensor]) -> None:
        finishes = [begin_all_gather(buffer, self.shard_group) for buffer in buffers]
        for finish in finishes:
            finish()

    def _rest(self) -> None:
        """No backward is under way."""
        self._is_open = False
        self._begun.clear()
        self._reached.clear()
        for bucket in self._buckets:
            bucket.expect()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that share the update."""
        return self._all_groups[0]

    @property
    def _replica_group(self) -> dist.ProcessGroup:
        return self._all_groups[1]

    @property
    def _all_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if "_groups" not in vars(self):
            vars(self)["_groups"] = self._mesh["dp_shard"].get_group(), self._mesh["dp_replicate"].get_group()
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup] = vars(self)["_groups"]
        return groups

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self.shares:
            raise UsageError(JOIN_CURE)
        self._require_joinable()
        return _Joined(self)

    @property
    def joins(self) -> bool:
        return bool(self._join_config.enable)

    @property
    def join_device(self) -> torch.device:
        return self._trained[0].device

    @property
    def join_process_group(self) -> Any:
        return data_mesh(self._mesh).get_group()


JOIN_CURE = (
    "a Trainer's step also reduces losses and weights, which Join does not shadow; take Join away and use "
    "nt.loader(dataset, plan, batch_size=..., uneven=True), which lets a rank that has run out join"
)


class _Joined(JoinHook):
    """What a rank that has run out does while the others train: it reduces zeros, as in torch's DDP."""

    def __init__(self, replica: ShardedUpdate) -> None:
        self._replica = replica

    def main_hook(self) -> None:
        for parameter in self._replica._trained:
            parameter.grad = None
        self._replica._complete()

    def post_hook(self, is_last_joiner: bool) -> None:
        """The weights of a rank that took every step, for all."""
        replica, group = self._replica, self._replica.join_process_group
        source = torch.tensor([group.rank() if is_last_joiner else -1], device=replica.join_device)
        dist.all_reduce(source, op=dist.ReduceOp.MAX, group=group)
        for bucket in replica._buckets:
            dist.broadcast(bucket.weights, group=group, group_src=int(source))


class _PieceUsage(Usage):
    """Marks of which the gradients lie in pieces.

    Attributes:
        unused: Indices of the parameters that no rank used in the last step.
    """

    def __init__(self, parameters: list[nn.Parameter], replica: ShardedUpdate) -> None:
        super().__init__(parameters)
        self._replica = [replica]  # in a list, so that it isn't a submodule of anything
        self.unused: set[int] = set()

    def clear_unused(self, totals: list[float]) -> None:
        self.unused = {index for index, total in enumerate(totals) if total == 0}
        pieces = {id(parameter): piece for parameter, piece in self._replica[0]._pairs()}
        for index in self.unused:
            pieces[id(self.parameters[index])].grad = None


def _placed(parameters: list[nn.Parameter], num_parts: int, whole: bool) -> Placement:
    sizes = [parameter.numel() for parameter in parameters]
    return dealt(sizes, num_parts) if whole else side_by_side(sizes, num_parts)
