"""torch's own schedules, made without processes: the oracle of `test_schedules`.

A multi-stage schedule computes every rank's actions in its constructor. The two single-stage ones have no such
list that is right (that of 1F1B numbers the last rank's forwards from 1), so that their step function is run on a stage
that computes nothing and writes down what it was asked for.
"""

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from nbtrain.planner.schedules import Action, Kind, Step, virtual_stages

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def torch_steps(name: str, p: int, m: int, v: int | None = None) -> tuple[tuple[int, ...], list[list[Step]]]:
    """The rank of each stage, and by rank what torch does. ValueError where torch refuses the numbers."""
    if virtual_stages(name) == 1:
        return tuple(range(p)), [_run(name, rank, p, m) for rank in range(p)]
    stages = [_stage(0, p, p * virtual_stages(name, v)) for _ in range(virtual_stages(name, v))]
    made = _without_messages(name)(stages, m, loss_fn=None)
    rank_of = tuple(made.stage_index_to_group_rank[stage] for stage in range(p * len(stages)))
    return rank_of, [_compute_steps(made.pipeline_order[rank]) for rank in range(p)]


def _without_messages(name: str) -> Any:
    """The class without the lowering to messages, which takes minutes for many ranks and is not compared."""
    cls = getattr(torch_schedules, CLASSES[name])
    return type(cls.__name__, (cls,), {"_prepare_schedule_with_comms": lambda self, actions: None})


def _compute_steps(actions: list[Any]) -> list[Step]:
    return [
        tuple(map(_action, action.sub_actions or [action])) for action in actions if action is not None
    ]  # None is an idle slot


def _action(action: Any) -> Action:
    return Action(action.stage_index, Kind(action.computation_type.value), action.microbatch_index)


def _stage(index: int, p: int, num_stages: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        stage_index=index,
        group_rank=index,
        group_size=p,
        num_stages=num_stages,
        has_backward=True,
        is_last=index == num_stages - 1,
        submod=None,
        device=None,
        **more,
    )


def _run(name: str, rank: int, p: int, m: int) -> list[Step]:
    done: list[Step] = []

    def record(kind: Kind) -> Any:
        return lambda microbatch, *args, **kwargs: done.append((Action(rank, kind, microbatch),))

    def nothing(*args: Any) -> list[Any]:
        return []

    stage = _stage(
        rank,
        p,
        p,
        forward_one_chunk=record(Kind.FORWARD),
        backward_one_chunk=record(Kind.BACKWARD),
        perform_reduce_grad=nothing,
        **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), nothing),
    )
    cls = getattr(torch_schedules, CLASSES[name])
    schedule = type(cls.__name__, (cls,), {"_initialize_stage": nothing})(stage, m, loss_fn=None)
    schedule._step_microbatches([()] * m, [{}] * m)
    return done
