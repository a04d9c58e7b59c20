"""Whose turn it is to ask, without ranks: the front end is a function."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nbtrain.cluster import prompts
from nbtrain.cluster.prompts import NOBODY, Prompts, first_failed


class Ranks:
    """Prompts and what was answered to them."""

    def __init__(self, *, attended: bool) -> None:
        self.answered: list[tuple[int, dict[str, Any]]] = []
        self.prompts = Prompts()
        self.prompts.open(self._reply, attended=attended)

    def ask(self, rank: int, text: str = "? ", number: int = 1) -> None:
        self.prompts.on_message(rank, {"number": number, "prompt": text, "password": False})

    def _reply(self, rank: int, *, number: int, **answer: Any) -> None:
        self.answered.append((rank, answer))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels that were shown; a person types what they read."""
    shown: list[str] = []

    def read(label: str, password: bool) -> str:
        shown.append(label)
        return label.upper()

    monkeypatch.setattr(prompts, "_read", read)
    return shown


def test_ranks_are_asked_in_their_order(typed: list[str]) -> None:
    ranks = Ranks(attended=True)
    for rank in (2, 0, 1):
        ranks.ask(rank)
    assert ranks.prompts.ranks == [0, 1, 2]
    ranks.prompts.put(lambda: None, num_ranks=3)
    assert ranks.answered == [(rank, {"text": f"RANK {rank}> ? "}) for rank in range(3)]
    assert ranks.prompts.ranks == []


@pytest.mark.parametrize(
    ("text", "label"),
    [("", "rank 2> "), ("lr? ", "rank 2> lr? "), ("ipdb> ", "rank 2 ipdb> "), ("In : ", "rank 2 In : ")],
)
def test_a_prompt_says_whose_it_is(typed: list[str], text: str, label: str) -> None:
    ranks = Ranks(attended=True)
    ranks.ask(2, text)
    ranks.prompts.put(lambda: None, num_ranks=1)
    assert typed == [label]


def test_a_cell_that_nobody_waits_for_answers_at_once() -> None:
    ranks = Ranks(attended=False)
    ranks.ask(1)
    assert ranks.answered == [(1, {"problem": NOBODY})]
    assert ranks.prompts.ranks == []


def test_what_stands_when_nobody_waits_any_longer_is_answered() -> None:
    ranks = Ranks(attended=False)
    with ranks.prompts.attended():
        ranks.ask(1)
        assert ranks.prompts.ranks == [1]
    assert ranks.answered == [(1, {"problem": NOBODY})]


def test_another_thread_does_not_ask() -> None:
    ranks = Ranks(attended=True)
    ranks.ask(1)
    thread = threading.Thread(target=lambda: ranks.prompts.put(lambda: None, num_ranks=1))
    thread.start()
    thread.join(10)
    assert ranks.prompts.ranks == [1]


def test_what_a_rank_withdraws_is_not_asked(typed: list[str]) -> None:
    ranks = Ranks(attended=True)
    ranks.ask(1)
    ranks.prompts.on_message(1, {"number": 1, "withdrawn": True})
    ranks.prompts.put(lambda: None, num_ranks=1)
    assert typed == []


def test_the_end_of_input_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(label: str, password: bool) -> str:
        raise EOFError

    monkeypatch.setattr(prompts, "_read", read)
    ranks = Ranks(attended=True)
    ranks.ask(0)
    ranks.prompts.put(lambda: None, num_ranks=1)
    assert ranks.answered == [(0, {"eof": True})]


def test_the_first_failure_of_the_last_cell() -> None:
    def error(cell: int, time: float, consequence: bool = False) -> dict[str, Any]:
        return {"cell": cell, "time": time, "consequence": consequence}

    assert first_failed({0: None, 1: None}) is None
    assert first_failed({0: error(4, 1.0), 1: error(7, 5.0), 2: error(7, 4.0), 3: error(7, 3.0, consequence=True)}) == 2
