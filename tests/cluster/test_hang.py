"""What the ranks' answers mean, without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbtrain.cluster.hang import Look, Wait, absent, described, diagnose, stuck

ALL = (0, 1, 2, 3)


def wait(op: str = "all_reduce", seq: int = 5, tensors: str = "float32 [4]", **given: object) -> Wait:
    return Wait(**{"op": op, "group": "0", "ranks": ALL, "seq": seq, "tensors": tensors, "seconds": 12.0, **given})  # type: ignore[arg-type]


def waits(rank: int, *those: Wait, place: str = "Cell In[7], line 3: dist.all_reduce(x)") -> Look:
    return Look(rank, "runs", "Cell In[7]", 12.0, place, waits=those or (wait(),))


ABSENT = {
    "still computing at Cell In[7], line 2: f(x)": Look(2, "runs", "Cell In[7]", 1.0, "Cell In[7], line 2: f(x)"),
    "waiting for its data in next(loader) at here": Look(2, "runs", "Cell In[7]", 1.0, "here", "next(loader)"),
    "left Cell In[7] early, without this collective": Look(2, "finished", "Cell In[7]"),
    "failed in Cell In[7]": Look(2, "failed", "Cell In[7]"),
    "dead (SIGKILL)": Look(2, "dead", "SIGKILL"),
    "no answer, as it is stopped or holds the interpreter in C code": Look(2, "silent", "Cell In[7]"),
    "idle, not running this cell": Look(2, "idle"),
}


@pytest.mark.parametrize("look", ABSENT.values(), ids=ABSENT)
def test_who_waits_and_what_the_missing_rank_does(look: Look) -> None:
    looks = [waits(0), waits(1), look, waits(3)]
    doing = next(text for text, one in ABSENT.items() if one is look)
    assert diagnose(looks) == [
        "Ranks 0-1,3 wait in all_reduce #5 of float32 [4] for 12 s, at Cell In[7], line 3: dist.all_reduce(x).",
        f"Rank 2 has not joined: {doing}.",
    ]
    assert absent(looks) == [2]
    assert stuck(looks, looks)


def test_different_operations() -> None:
    looks = [waits(0), waits(1), waits(2, wait("broadcast")), waits(3)]
    assert "They do not agree on the operation: all_reduce on ranks 0-1,3; broadcast on rank 2." in diagnose(looks)


def test_messages_have_numbers_of_their_own() -> None:
    looks = [waits(0), waits(1), waits(2, wait("broadcast", 61)), waits(3, wait(seq=2, by="messages"))]
    found = "all_reduce on ranks 0-1; broadcast on rank 2; all_reduce by messages on rank 3"
    assert f"They do not agree on the operation: {found}." in diagnose(looks)


def test_different_shapes_and_dtypes() -> None:
    looks = [waits(0), waits(1), waits(2, wait(tensors="float64 [6]")), waits(3)]
    text = "They do not agree on the shape or dtype: float32 [4] on ranks 0-1,3; float64 [6] on rank 2."
    assert text in diagnose(looks)


@pytest.mark.parametrize(("seq", "text"), [(6, "one collective ahead"), (4, "one collective behind"), (8, "3 coll")])
def test_one_rank_is_ahead_or_behind(seq: int, text: str) -> None:
    found = diagnose([waits(0), waits(1), waits(2, wait(seq=seq)), waits(3)])
    assert any(line.startswith(f"Rank 2 is {text}") for line in found)


def test_a_rank_that_waits_in_another_group() -> None:
    other = wait("barrier", 3, "", group="1", ranks=(2, 3))
    found = diagnose([waits(0), waits(1), waits(2, other), waits(3)])
    assert found[1].startswith("Rank 2 has not joined: waiting in barrier #3 of ranks 2-3")
    assert found[2].startswith("Rank 2 waits in barrier #3")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("reduce_scatter_tensor", "all_reduce"),  # gloo's name of an asynchronous one
        ("all_gather_object", "all_gather"),
        ("all_gather_into_tensor", "all_gather_single"),
        ("send", "recv"),
    ],
)
def test_names_of_the_same_operation_agree(ours: str, theirs: str) -> None:
    looks = [waits(0, wait(ours)), *(waits(rank, wait(theirs)) for rank in (1, 2, 3))]
    assert diagnose(looks) == []
    assert not stuck(looks, looks)


def test_gathers_of_different_shapes_are_legal() -> None:
    looks = [waits(rank, wait("all_gather", tensors=f"float32 [{rank}]")) for rank in ALL]
    assert diagnose(looks) == []


def test_ranks_that_compute_are_no_hang() -> None:
    looks = [Look(rank, "runs", "Cell In[7]", 500.0, "somewhere") for rank in ALL]
    assert not stuck(looks, looks)
    assert diagnose(looks) == []


def test_a_loop_that_makes_progress_is_no_hang() -> None:
    """Whoever waits for a slow rank now waits in the next collective at the next look."""
    busy = Look(2, "runs", "Cell In[7]", 5.0, "f(x)")
    before = [waits(0), waits(1), busy, waits(3)]
    now = [waits(rank, wait(seq=6)) if rank != 2 else busy for rank in ALL]
    assert not stuck(before, now)
    assert stuck(now, now)


def test_alike_ranks_are_one_row() -> None:
    looks = [waits(0), waits(1), Look(2, "dead", "SIGKILL"), waits(3)]
    shown = described(looks, "4 ranks", 4)
    assert [row[0] for row in shown.rows] == ["0-1,3", "2"]
    assert shown.rows[0][3] == "all_reduce #5 of float32 [4] for 12 s"
    assert shown.rows[1][1] == "dead (SIGKILL)"
    assert "Rank 2 has not joined: dead (SIGKILL)." in repr(shown)
    assert "&lt;" in described([replace(looks[0], place="<module>")], "", 4)._repr_html_()


def test_a_smaller_group_is_named() -> None:
    look = Look(0, "runs", "Cell In[7]", 1.0, "here", waits=(wait(ranks=(0, 2), group="1"),))
    assert described([look], "", 4).rows[0][3] == "all_reduce #5 of float32 [4] of ranks 0,2 for 12 s"


states = st.sampled_from(["idle", "runs", "finished", "failed", "dead", "silent"])
some_waits = st.builds(
    wait,
    st.sampled_from(["all_reduce", "broadcast", "barrier", "send"]),
    st.integers(1, 3),
    st.sampled_from(["float32 [4]", "float64 [6]", ""]),
    group=st.sampled_from(["0", "1"]),
)
some_looks = st.tuples(
    *(st.builds(Look, st.just(rank), states, waits=st.lists(some_waits, max_size=2).map(tuple)) for rank in ALL)
)


@given(some_looks, some_looks)
def test_every_hang_is_explained(before: tuple[Look, ...], now: tuple[Look, ...]) -> None:
    found = diagnose(now)
    if stuck(before, now):
        assert found
        assert any(one.waits for one in now)
    assert all(line.endswith(".") and line[0].isupper() for line in found)
    named = [one.rank for one in now if one.waits]
    assert not found or named
