"""The merger, without ranks: what is alike is shown once, what differs is labelled, and nothing is lost."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from nbtrain.cluster.merge import Line, Merger, Rich


def show(merger: Merger, now: float = 1.0, *, final: bool = False) -> list[str]:
    return [
        piece.label + (piece.token.text if isinstance(piece.token, Line) else str(piece.token.data))
        for piece in merger.take(now, final=final)
    ]


def test_alike_lines_are_shown_once_and_at_once() -> None:
    merger = Merger(range(4))
    for rank in range(4):
        merger.text(rank, "stdout", "hello\n", now=0.0)
    assert show(merger, now=0.0) == ["hello\n"]


def test_a_line_of_one_rank_waits_for_the_others_and_is_then_labelled() -> None:
    merger = Merger(range(4), hold_s=0.1)
    merger.text(0, "stdout", "only here\n", now=0.0)
    assert show(merger, now=0.05) == []
    assert show(merger, now=0.11) == ["0| only here\n"]


def test_different_lines_come_in_rank_order() -> None:
    merger = Merger(range(3))
    for rank in (2, 0, 1):
        merger.text(rank, "stdout", f"a{rank}\nb{rank}\n", now=0.0)
    assert show(merger) == [f"{r}| {name}{r}\n" for name in "ab" for r in range(3)]


def test_the_odd_rank_is_named_and_the_rest_stays_merged() -> None:
    merger = Merger(range(3))
    for rank in range(3):
        odd = "warning\n" if rank == 1 else ""
        merger.text(rank, "stdout", f"start\n{odd}end\n", now=0.0)
    assert show(merger) == ["start\n", "1| warning\n", "end\n"]


def test_equal_ranks_share_a_label() -> None:
    merger = Merger(range(4))
    for rank in range(4):
        merger.text(rank, "stdout", "odd\n" if rank == 1 else "even\n", now=0.0)
    assert show(merger) == ["0,2-3| even\n", "1| odd\n"]


def test_text_may_be_cut_anywhere() -> None:
    merger = Merger(range(2))
    for rank in range(2):
        for letter in "one\ntwo\n":
            merger.text(rank, "stdout", letter, now=0.0)
    assert show(merger) == ["one\n", "two\n"]


def test_an_unfinished_line_is_shown_after_a_while() -> None:
    merger = Merger(range(2), hold_s=0.1)
    for rank in range(2):
        merger.text(rank, "stdout", "working ", now=0.0)
    assert show(merger, now=0.15) == []
    assert show(merger, now=0.25) == ["working "]


def test_a_rank_that_printed_nothing_holds_nobody_up_for_long() -> None:
    merger = Merger(range(2), hold_s=0.1)
    merger.finish(0, now=0.0)
    merger.text(1, "stdout", "late\n", now=0.0)
    assert show(merger, now=0.2) == ["1| late\n"]


def test_a_finished_bar_waits_for_the_slowest_rank() -> None:
    merger = Merger(range(2), hold_s=0.1)
    merger.text(1, "stderr", "\rgo:  20%|##        | 2/10 [00:01<00:04, 2.00it/s]", now=0.0)
    merger.text(0, "stderr", "\rgo: 100%|##########| 10/10 [00:01<00:00, 9.00it/s]\n", now=0.0)
    assert show(merger, now=5.0) == []
    merger.text(1, "stderr", "\rgo: 100%|##########| 10/10 [00:05<00:00, 2.00it/s]\n", now=5.0)
    assert len(show(merger, now=5.0)) == 1


def test_a_bar_is_one_bar_though_its_words_come_and_go() -> None:
    merger = Merger(range(2), hold_s=0.1)
    merger.text(1, "stderr", "\r███░ 3/4  3.9 it/s  0:01 left", now=0.0)
    merger.text(0, "stderr", "\r████ 4/4  loss 2.5  4.0 it/s  0:01\n", now=0.0)
    assert show(merger, now=5.0) == []
    merger.text(1, "stderr", "\r████ 4/4  loss 2.5  3.0 it/s  0:02\n", now=5.0)
    assert len(show(merger, now=5.0)) == 1


def test_a_bar_is_shown_once_from_the_slowest_rank() -> None:
    merger = Merger(range(2))
    merger.text(0, "stderr", "\r  50%|#####     | 5/10 [00:01<00:01]", now=0.0)
    merger.text(1, "stderr", "\r  20%|##        | 2/10 [00:01<00:04]", now=0.0)
    bar = merger.bar()
    assert bar is not None
    assert "2/10" in bar.text
    for rank in range(2):
        merger.text(rank, "stderr", f"\r100%|##########| 10/10 [00:0{rank}<00:00]\n", now=0.0)
    assert show(merger) == ["100%|##########| 10/10 [00:00<00:00]\n"]
    assert merger.bar() is None


def test_alike_figures_are_shown_once_and_others_by_rank() -> None:
    merger = Merger(range(2))
    for rank in range(2):
        merger.rich(rank, Rich("display_data", {"text/html": "<b>"}), now=0.0)
        merger.rich(rank, Rich("display_data", {"text/html": f"{rank}"}), now=0.0)
    assert show(merger, now=2.0) == ["{'text/html': '<b>'}", "0| {'text/html': '0'}", "1| {'text/html': '1'}"]


@given(
    st.lists(st.lists(st.sampled_from("abcd"), max_size=12), min_size=1, max_size=4),
    st.integers(0, 2**16),
)
def test_nothing_is_lost_and_order_within_a_rank_holds(outputs: list[list[str]], seed: int) -> None:
    merger = Merger(range(len(outputs)), hold_s=0.1)
    rng = random.Random(seed)
    left = {rank: list(lines) for rank, lines in enumerate(outputs)}
    shown: dict[int, list[str]] = {rank: [] for rank in left}
    now = 0.0

    def collect(final: bool = False) -> None:
        for piece in merger.take(now, final=final):
            assert isinstance(piece.token, Line)
            for rank in piece.ranks:
                shown[rank].append(piece.token.text.strip())

    while any(left.values()):
        rank = rng.choice([r for r, lines in left.items() if lines])
        merger.text(rank, "stdout", left[rank].pop(0) + "\n", now)
        now += rng.random() * 0.1
        if rng.random() < 0.5:
            collect()
    collect(final=True)
    assert shown == dict(enumerate(outputs))
    assert merger.empty


def test_what_one_rank_says_for_all_waits_for_nobody_and_has_no_label() -> None:
    merger = Merger(range(3), hold_s=1.0)
    merger.text(0, "stdout", "before\n", now=0.0)
    merger.shared(0, "a table\n  of two lines", now=0.0)
    for rank in (1, 2):
        merger.text(rank, "stdout", "before\na table\n", now=0.0)
    merger.text(0, "stdout", "after\n", now=0.0)
    assert show(merger, now=0.1) == ["before\n", "a table\n", "  of two lines\n"]
    assert show(merger, now=0.1, final=True) == ["1-2| a table\n", "0| after\n"]
