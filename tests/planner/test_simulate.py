"""Times from the dependency graph: the bubbles of the literature, and what must happen before what."""

import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbtrain.errors import PlanError, UsageError
from nbtrain.plan import Plan
from nbtrain.plan.fields import SCHEDULES
from nbtrain.plan.pipeline import bubble, fits
from nbtrain.planner.schedules import Action, Kind, Schedule, forward_only, make_schedule, virtual_stages
from nbtrain.planner.simulate import Simulation, simulate

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741 - the paper's letter
LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
SPLIT = ("interleaved_zero_bubble", "zbv", "dualpipev")


def formula(name: str, p: int, m: int, v: int) -> float:
    """What a plan says of itself.

    Where the inputs' gradients travel alone, a rank waits for p - 1 single actions, and not for F, I and W of each.
    """
    return bubble(Plan(pp=p, schedule=name, num_microbatches=m, num_virtual_stages=v))


def require_happens_before(simulation: Simulation) -> None:
    """Each action once, on the rank of its stage, one after another, and none before what it needs."""
    schedule = simulation.schedule
    ends: dict[Kind, dict[tuple[int, int], float]] = {kind: {} for kind in Kind}
    for rank, row in enumerate(simulation.by_rank):
        assert [timed.action for timed in row] == list(schedule.actions(rank))
        assert {schedule.rank_of[timed.action.stage] for timed in row} == {rank}
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(row))
        for action, _, end_s in row:
            assert (action.stage, action.microbatch) not in ends[action.kind]
            ends[action.kind][action.stage, action.microbatch] = end_s
    gradients = ends[B] | ends[I]
    chunks = set(itertools.product(range(schedule.num_stages), range(schedule.num_microbatches)))
    assert ends[F].keys() == chunks
    assert gradients.keys() in (chunks, set())  # none in evaluation
    assert len(gradients) == len(ends[B]) + len(ends[I])
    assert ends[W].keys() == ends[I].keys()
    for action, start_s, _ in itertools.chain(*simulation.by_rank):
        stage, microbatch = action.stage, action.microbatch
        if action.kind is F:
            assert stage == 0 or ends[F][stage - 1, microbatch] <= start_s
        elif action.kind is W:
            assert ends[I][stage, microbatch] <= start_s
        else:
            assert ends[F][stage, microbatch] <= start_s
            assert stage == schedule.num_stages - 1 or gradients[stage + 1, microbatch] <= start_s


@st.composite
def small_schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, 6))
    m = draw(st.integers(1, 20).filter(lambda m: fits(name, p, m)))
    v = draw(st.integers(2, 4)) if name in LOOPED else None
    return make_schedule(name, p, m, v)


@given(small_schedules(), st.randoms(use_true_random=False), st.floats(0, 3))
@settings(max_examples=150, deadline=None)
def test_an_action_never_starts_before_what_it_needs(schedule: Schedule, random: object, delay_s: float) -> None:
    durations = {(stage, kind): random.random() for stage in range(schedule.num_stages) for kind in Kind}
    simulation = simulate(schedule, durations, communication_s=delay_s)
    require_happens_before(simulation)
    for rank in range(schedule.num_ranks):
        assert simulation.busy_s[rank] == pytest.approx(sum(durations[a.stage, a.kind] for a in schedule.actions(rank)))


@given(small_schedules(), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_forwards_alone_run_on_the_same_stages_with_any_number_of_microbatches(schedule: Schedule, m: int) -> None:
    evaluation = forward_only(schedule, m)
    assert (evaluation.rank_of, evaluation.num_microbatches) == (schedule.rank_of, m)
    require_happens_before(simulate(evaluation))


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_and_order_up_to_64_ranks(name: str) -> None:
    for p, m in ((4, 8), (8, 32), (64, 256)):
        schedule = make_schedule(name, p, m)
        simulation = simulate(schedule)
        require_happens_before(simulation)
        expected = formula(name, p, m, virtual_stages(name))
        assert simulation.bubble == pytest.approx(expected)
        assert simulation.makespan_s == pytest.approx(schedule.num_virtual_stages * m * 3 * (1 + expected))


def test_zbv_ranks_do_not_idle_once_they_have_begun() -> None:
    for actions in simulate(make_schedule("zbv", 8, 32)).by_rank:
        assert all(before.end_s == after.start_s for before, after in itertools.pairwise(actions))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("gpipe", (8, 8, 8, 8)),
        ("1f1b", (4, 3, 2, 1)),
        ("interleaved_1f1b", (11, 9, 7, 5)),
        ("looped_bfs", (16, 16, 16, 16)),
        ("interleaved_zero_bubble", (8, 7, 6, 5)),
        ("zbv", (8, 8, 8, 8)),
        ("dualpipev", (9, 9, 9, 9)),
    ],
)
def test_live_chunks_of_4_ranks_and_8_microbatches(name: str, chunks: tuple[int, ...]) -> None:
    assert make_schedule(name, 4, 8).live_chunks() == chunks


def test_weights_gradients_that_wait_keep_something_alive() -> None:
    assert make_schedule("interleaved_zero_bubble", 4, 8).live_chunks(until=W) == (8, 8, 8, 8)


def test_times_of_two_ranks_by_hand() -> None:
    """F is 1, B is 2 and a message takes 0.5.

    ::

        rank 0   0F0 0F1 -      -      -      0B0    -  0B1
        rank 1   -   1F0    1B0       1F1 1B1
    """
    simulation = simulate(make_schedule("1f1b", 2, 2), {F: 1, B: 2}, communication_s=0.5)
    spelled = [[(repr(a), start_s, end_s) for a, start_s, end_s in actions] for actions in simulation.by_rank]
    assert spelled == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert (simulation.makespan_s, simulation.busy_s, simulation.bubble_s) == (10, (6, 6), (4, 4))
    assert simulation.bubble == pytest.approx(8 / 12)
    assert pickle.loads(pickle.dumps(simulation)) == simulation


def test_durations_by_action_before_those_by_stage_before_those_by_kind() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    table = {F: 1.0, I: 2.0, W: 3.0, (1, F): 10.0, Action(1, F, 1): 100.0}
    timed = {repr(a): end_s - start_s for row in simulate(schedule, table).by_rank for a, start_s, end_s in row}
    assert timed == {"0F0": 1, "0F1": 1, "1F0": 10, "1F1": 100} | dict.fromkeys(("0B0", "0B1", "1B0", "1B1"), 5)
    messages: list[tuple[int, int]] = []
    simulate(schedule, lambda action: 1.0, communication_s=lambda *ranks: messages.append(ranks) or 0.0)
    assert sorted(messages) == [(0, 1), (0, 1), (1, 0), (1, 0)]
    with pytest.raises(UsageError, match=r"3W0 has no duration; give one for it, for \(3, Kind.BACKWARD_WEIGHT\)"):
        simulate(make_schedule("zbv", 2, 3), {F: 1.0, I: 1.0})


def test_a_schedule_that_stands_still_names_who_waits_for_what() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    steps = ((*schedule.steps[0][1:], schedule.steps[0][0]), schedule.steps[1])
    with pytest.raises(PlanError, match="rank 0 in 0B0 for 0F0, rank 1 in 1F0 for 0F0"):
        simulate(replace(schedule, steps=steps))
