"""Schedules whose stages go down the ranks and up again: rank r of p holds the stages r and 2p - 1 - r.

::

    rank 0    stage 0          stage 7
    rank 1      stage 1      stage 6
    rank 2        stage 2  stage 5
    rank 3         stage 3 stage 4      the turn: no message between them

Rank 0 has the first stage and the loss, so that its backwards begin as soon as a microbatch is through. ``down`` is a
rank's first stage and ``up`` its second.
"""

from __future__ import annotations

from collections import Counter, deque

from nbtrain.planner.schedule import Action, Kind, Step


class _Stage:
    """Hands out a stage's actions, each kind with its next microbatch."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.done: Counter[Kind] = Counter()

    def next(self, kind: Kind) -> Action:
        action = Action(self.index, kind, self.done[kind])
        self.done[kind] += 1
        return action

    def forward(self) -> Action:
        return self.next(Kind.FORWARD)

    def input(self) -> Action:
        return self.next(Kind.BACKWARD_INPUT)

    def weight(self) -> Action:
        return self.next(Kind.BACKWARD_WEIGHT)

    def both(self) -> list[Action]:
        """A backward in its two parts."""
        return [self.input(), self.weight()]


def zbv(rank: int, p: int, v: int, m: int) -> list[Step]:
    """No bubble where F, I and W take equally long, with 1F1B's memory (ZB-V, arXiv 2401.10241, section 6).

    The pattern needs 2p - 1 microbatches; of fewer, it runs the part that there is.
    """
    down, up = _Stage(rank), _Stage(2 * p - 1 - rank)
    planned = max(m, 2 * p - 1)
    actions = [down.forward() for _ in range(2 * (p - rank) - 1)]
    for _ in range(rank):
        actions += [up.forward(), down.forward()]
    for _ in range(p - rank):
        actions += [up.forward(), *up.both()]
    for _ in range(planned - p):
        if down.done[Kind.FORWARD] < planned:
            actions.append(down.forward())
        actions += [*down.both(), up.forward(), *up.both()]
    actions += _zbv_cooldown(down, up, rank, p)
    return [(action,) for action in actions if action.microbatch < m]


def _zbv_cooldown(down: _Stage, up: _Stage, rank: int, p: int) -> list[Action]:
    """The last gradients of inputs travel first; gradients of weights fill what would be idle."""
    actions = []
    for _ in range(rank):
        actions += [down.input(), up.input()]
    for _ in range(p - rank):
        actions += [down.input(), down.weight()]
    for stage in (up, down):
        while stage.done[Kind.BACKWARD_WEIGHT] < stage.done[Kind.BACKWARD_INPUT]:
            actions.append(stage.weight())
    return actions


class _Halves:
    """Hands out dualpipev's actions of a rank: a backward is whole, or its weights' part waits in a queue."""

    def __init__(self, rank: int, p: int) -> None:
        self.down, self.up = _Stage(rank), _Stage(2 * p - 1 - rank)
        self.steps: list[Step] = []
        self._postponed: deque[Action] = deque()

    def forward(self, stage: _Stage) -> None:
        self.steps.append((stage.forward(),))

    def backward(self, stage: _Stage) -> None:
        self.steps.append((stage.next(Kind.BACKWARD),))

    def overlapped(self, forward: _Stage, backward: _Stage) -> None:
        """A forward and a backward of different microbatches at once: each one's messages behind the other's work."""
        self.steps.append((forward.forward(), backward.next(Kind.BACKWARD)))

    def input(self, stage: _Stage) -> None:
        """The inputs' part alone. Whole backwards and such parts share one count of microbatches."""
        microbatch = stage.next(Kind.BACKWARD).microbatch
        self.steps.append((Action(stage.index, Kind.BACKWARD_INPUT, microbatch),))
        self._postponed.append(Action(stage.index, Kind.BACKWARD_WEIGHT, microbatch))

    def weight(self) -> None:
        """The weights' part that has waited longest."""
        self.steps.append((self._postponed.popleft(),))


def dualpipev(rank: int, p: int, v: int, m: int) -> list[Step]:
    """A forward overlapped with a backward in the steady state (arXiv 2412.19437, section 3.2.1, cut in half).

    ::

        F0 .. | F0 F1 .. | I1 W1 F1 .. | [F0 B1] [F1 B0] .. | B1 [F1 B0] .. | B1 B0 .. I1 I0 .. | W I0 .. | W ..
    """
    do = _Halves(rank, p)
    down, up = do.down, do.up
    to_the_turn = p - 1 - rank
    for _ in range(2 * to_the_turn):
        do.forward(down)
    for _ in range(rank + 1):
        do.forward(down)
        do.forward(up)
    for _ in range(to_the_turn):
        do.input(up)
        do.weight()
        do.forward(up)
    _dualpipev_steady(do, num_pairs=m - 2 * p + rank + 1, is_turn=rank == p - 1)
    for _ in range(to_the_turn):
        do.backward(up)
        do.overlapped(up, down)
    _dualpipev_cooldown(do, rank, to_the_turn)
    return do.steps


def _dualpipev_steady(do: _Halves, num_pairs: int, is_turn: bool) -> None:
    for pair in range(num_pairs):
        if is_turn and pair == 0:
            # both of its stages are neighbours: apart, the backward's gradient gets away a forward earlier
            do.forward(do.down)
            do.backward(do.up)
        else:
            do.overlapped(do.down, do.up)
        do.overlapped(do.up, do.down)


def _dualpipev_cooldown(do: _Halves, rank: int, to_the_turn: int) -> None:
    """The second half of the last backwards postpones the weights' part, which then fills the wait for gradients."""
    num_whole = rank + 1
    for position in range(2 * (rank + 1)):
        stage = do.down if position % 2 else do.up
        if position < num_whole:
            do.backward(stage)
        else:
            do.input(stage)
    for _ in range(to_the_turn):
        do.weight()
        do.input(do.down)
    for _ in range(rank + 1):
        do.weight()
