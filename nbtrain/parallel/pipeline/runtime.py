"""Runs a schedule of `nbtrain.planner` on torch's schedule runtime."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from nbtrain.events import EventKind
from nbtrain.parallel.pipeline.quiet import quiet
from nbtrain.parallel.pipeline.stage import Stage
from nbtrain.planner.schedule import Kind, Schedule, Step
from nbtrain.telemetry.timeline import recorder

_LOGGER = logging.getLogger("torch.distributed.pipelining.schedules")  # gets the whole schedule when an action raises


class Runtime(_PipelineScheduleRuntime):
    """torch's runtime with a given order of actions.

    Args:
        stages: Of this rank, in order.
        schedule: Of all ranks.
    """

    def __init__(self, stages: Sequence[Stage], schedule: Schedule) -> None:
        super().__init__(list(stages), schedule.num_microbatches, scale_grads=False)  # type: ignore[no-untyped-call]
        self.schedule = schedule
        self.held = stages
        self.stage_index_to_group_rank = dict(enumerate(schedule.rank_of))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        by_index = {stage.stage_index: stage for stage in stages}
        heard = _Heard(schedule, stages)
        self.fwd_recv_ops = _Waited("activations", -1, by_index, heard)
        self.bwd_recv_ops = _Waited("gradients", 1, by_index, heard)
        # without torch's actions for FSDP and gradients: these are no matter of the schedule here
        actions = {rank: [_as_torchs(step) for step in steps] for rank, steps in enumerate(schedule.steps)}
        self.pipeline_order_with_comms = _add_send_recv(
            actions, stage_to_rank=lambda stage: schedule.rank_of[stage], num_stages=schedule.num_stages
        )

    def run(self) -> None:
        """The stages have begun a microbatch for each of the schedule's."""
        count = self.schedule.num_microbatches
        with quiet(_LOGGER):
            self._step_microbatches([()] * count, [{}] * count, return_outputs=False)
        for stage in self.held:
            stage.finish_sends()

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Shapes are known."""


class _Waited(dict[tuple[int, int], list[dist.Work]]):
    """Messages to the stages of this rank that are under way; to take some out is to wait for them.

    Args:
        what: They carry.
        step: From a stage to the one that they come from.
        stages: Of this rank, by index.
        heard: Called with what came, from which stage, and its microbatch.
    """

    def __init__(self, what: str, step: int, stages: dict[int, Stage], heard: _Heard) -> None:
        super().__init__()
        self._what, self._step, self._stages, self._heard = what, step, stages, heard

    def __setitem__(self, key: tuple[int, int], works: list[dist.Work]) -> None:
        super().__setitem__(key, self._stages[key[0]].kept(works))

    def pop(self, key: tuple[int, int], *default: Any) -> list[dist.Work]:
        stage, microbatch = key
        with recorder().span(EventKind.RECEIVE, stage, microbatch, self._what):
            self._stages[stage].wait("receive", self._what, microbatch, stage + self._step, super().pop(key, *default))
        self._heard.note(self._what, stage + self._step, microbatch)
        return []


class _Heard:
    """Lets go of what was sent when something that comes shows that it was taken.

    A rank does one action after another: when it has sent what one gave, it has taken what those before it needed.
    Without this all that is sent would stay in memory to the end of the schedule.

    Args:
        schedule: Of all ranks.
        stages: Of this one.
    """

    _TAKES: ClassVar = {
        Kind.FORWARD: "activations",
        Kind.BACKWARD: "gradients",
        Kind.BACKWARD_INPUT: "gradients",
    }

    def __init__(self, schedule: Schedule, stages: Sequence[Stage]) -> None:
        self._rank_of, self._stages = schedule.rank_of, stages
        self._turns = {
            (self._TAKES[action.kind], action.stage, action.microbatch): turn
            for steps in schedule.steps
            for turn, step in enumerate(steps)
            for action in step
            if action.kind in self._TAKES
        }

    def note(self, what: str, stage: int, microbatch: int) -> None:
        """``stage`` has sent ``what``."""
        rank, turn = self._rank_of[stage], self._turns[what, stage, microbatch]

        def is_taken(what: str, stage: int, microbatch: int) -> bool:
            return self._rank_of[stage] == rank and self._turns[what, stage, microbatch] < turn

        for held in self._stages:
            held.finish_sends(is_taken)


def _as_torchs(step: Step) -> _Action:
    actions = [_Action(action.stage, _ComputationType(action.kind.value), action.microbatch) for action in step]
    return actions[0] if len(actions) == 1 else _Action(-1, OVERLAP_F_B, None, tuple(actions))
