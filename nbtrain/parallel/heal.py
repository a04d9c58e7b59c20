"""`heal`: models, trainers and loaders on a rank that takes a dead one's place.

::

    donor      the lowest survivor                finds for each newcomer its source, and names what was healed
    source     a replica of the dead rank, or     structure: blueprint, plan, optimizer, scheduler, loss function
               the rank that mirrors its shards   numbers: weights, buffers, optimizer state
    newcomer   builds the same without a collective, and takes the numbers

The structure comes from the source too: with pipeline parallelism only ranks of the same stages have the dead rank's
parameters in their optimizer.

Each stage is tried on its own rank, and all ranks hear what failed anywhere before the next begins: what cannot be
carried over is lost on all ranks alike, and everything else is healed.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from typing import Any

from nbtrain.errors import NbtrainError, SessionError
from nbtrain.parallel import mesh, shard
from nbtrain.parallel.belongings import LOADER_PARTS, TRAINER_PARTS, Belongings, ModelKey, find_belongings, strangers
from nbtrain.parallel.heirs import Heir, Here, LoaderHeir, ModelHeir, TrainerHeir
from nbtrain.parallel.parcel import definitions
from nbtrain.parallel.plain import Lost, agreed, plain_values
from nbtrain.parallel.stepper import Stepper
from nbtrain.parallel.transfer import broadcast, gather, receive, send
from nbtrain.parallel.update import ShardedUpdate
from nbtrain.plan import Plan

_SHELL_NAMES = {"In", "Out", "get_ipython", "exit", "quit", "open"}
_DEFINED = (types.ModuleType, types.FunctionType, type)
_AGAIN = "make the model and the trainer again on all ranks, and trainer.load what trainer.save wrote"
_TRAINER_AGAIN = "the model is whole: make the trainer again on all ranks"
_ORDER: list[type] = [ModelHeir, TrainerHeir, LoaderHeir]  # what comes later may link to what was before
_KEPT = "on no other rank (Trainer(..., redundancy=True) keeps a copy)"
_ONLY_ONE = "its part of the model was on no other rank (with twice the ranks, dp_replicate=2 keeps a copy)"
_GONE = f"its shards were {_KEPT}"
_STATE_GONE = f"its optimizer state was {_KEPT}"
_PIECES_GONE = f"its pieces of the step that was under way were {_KEPT}"


def heal(namespace: dict[str, Any], newcomers: tuple[int, ...]) -> dict[str, Any]:
    """Gives newcomers what the dead ranks had: models and trainers at the step at which the others are, loaders with
    their datasets and positions. Collective.

    The groups stand, and `live.rebind` has run on all ranks. Random states of newcomers stay as they are, unless a
    mirror knows the dead rank's: dropout then goes on as it would have.

    Args:
        namespace: The notebook's names on this rank; a newcomer's get what was healed.
        newcomers: Ranks whose process is new.

    Returns:
        The same on all ranks: ``{"healed": names, "lost": {name: reason}, "missing": names, "reset": names}``. Missing
        are names that the others have and a newcomer has not, beside those healed or lost: it has not run their cells.
        Reset are those that a replayed assignment has set to what they were at first, while others have another value.
    """
    return _Healing(namespace, newcomers).run()


class _Healing:
    """One call of `heal` on one rank. Ranks go through `run` in step: what comes next depends on what all know."""

    def __init__(self, namespace: dict[str, Any], newcomers: tuple[int, ...]) -> None:
        self._newcomers = newcomers
        self._rank = mesh.rank()
        self._survivors = [rank for rank in range(mesh.world_size()) if rank not in newcomers]
        self._is_new = self._rank in newcomers
        self._is_donor = self._rank == self._survivors[0]
        self._here = Here(namespace, Belongings() if self._is_new else find_belongings(namespace))
        self._lost: dict[Heir, str] = {}

    def run(self) -> dict[str, Any]:
        if not self._is_new:
            for model in self._here.belongings.models.values():
                if model.layout.shards:
                    shard.reshard(model.module)  # a newcomer's are: it would gather alone
        for heir in self._survey():
            if reason := self._lost.get(heir) or self._carry(heir):
                self._lost[heir] = reason
                if self._is_new:
                    heir.drop(self._here)
            else:
                heir.settle(self._here)
        self._mark_lost()
        for _, trainer in sorted(self._here.belongings.trainers.items()):
            if not trainer._stepper.lost:
                trainer._stepper.mirror_again()
        return self._report()

    def _survey(self) -> list[Heir]:
        """What any survivor has, and what the newcomers' namespaces hold."""
        own, names = self._here.belongings, self._here.namespace
        heirs: list[Heir] = [
            *map(ModelHeir, own.models),
            *map(TrainerHeir, own.trainers),
            *map(LoaderHeir, own.loaders),
        ]
        reports = gather((heirs, set(names), definitions(names)))
        theirs = [reports[rank] for rank in self._newcomers]
        self._here.theirs = set.intersection(*(names for _, names, _ in theirs))
        self._here.definitions = set.intersection(*(defined for _, _, defined in theirs))
        had = [reports[rank][0] for rank in self._survivors]
        everything: list[Heir] = list(dict.fromkeys(heir for heirs in had for heir in heirs))
        for heir in everything:
            if not all(heir in heirs for heirs in had):
                self._lost[heir] = "not every rank has it under the same names"
        return sorted(everything, key=lambda heir: _ORDER.index(type(heir)))

    def _carry(self, heir: Heir) -> str:
        """Why ``heir`` could not be carried over; "" where it was."""
        routes = broadcast(self._routes(heir) if self._is_donor else None, self._survivors[0])
        if isinstance(routes, str):
            return routes
        sources = {source for source, _ in routes.values()}
        structure = _Attempt(lambda: heir.structure(self._here) if self._rank in sources else b"")
        numbers = _Attempt(
            lambda: {
                newcomer: heir.numbers(self._here, mirrored)
                for newcomer, (source, mirrored) in routes.items()
                if source == self._rank
            }
        )
        if problem := _first(structure.problem, numbers.problem):
            return problem
        sent = self._pass({newcomer: (source, structure.value) for newcomer, (source, _) in routes.items()})
        built = _Attempt(lambda: heir.build(self._here, sent) if self._is_new else None)
        if problem := _first(built.problem):
            return problem
        sent = self._pass({to: (source, (numbers.value or {}).get(to)) for to, (source, _) in routes.items()})
        return _first(_Attempt(lambda: heir.take(self._here, sent) if self._is_new else None).problem)

    def _pass(self, parcels: dict[int, tuple[int, Any]]) -> Any:
        """Each newcomer's parcel from its source, one after another; what this rank got."""
        got = None
        for newcomer, (source, parcel) in parcels.items():
            if self._rank == source:
                send(parcel, newcomer)
            elif self._rank == newcomer:
                got = receive(source)
        return got

    def _routes(self, heir: Heir) -> dict[int, tuple[int, bool]] | str:
        """For each newcomer the source, and whether it sends what it mirrors; or why there is none. On the donor."""
        if isinstance(heir, LoaderHeir):
            return dict.fromkeys(self._newcomers, (self._rank, False))
        key = self._model_key(heir)
        if isinstance(heir, TrainerHeir) and (reason := self._lost.get(ModelHeir(key))):
            return reason
        layout = self._here.belongings.models[key].layout
        update = layout.result if isinstance(layout.result, ShardedUpdate) else None
        pieces = update is not None and (isinstance(heir, TrainerHeir) or update.owed)
        routes: dict[int, tuple[int, bool]] = {}
        for newcomer in self._newcomers:
            replicas = mesh.replicas(layout.plan, newcomer, optimizer=pieces)
            alike = [rank for rank in replicas if rank not in self._newcomers]
            holder = self._holder(key, newcomer)
            if alike:
                routes[newcomer] = (alike[0], False)
            elif holder is None:
                return _gone(layout.plan, heir, pieces=pieces)
            elif holder in self._newcomers:
                return (
                    f"ranks {newcomer} and {holder} are both new, and {holder} alone had a copy of {newcomer}'s shards"
                )
            else:
                routes[newcomer] = (holder, True)
        return routes

    def _holder(self, key: ModelKey, newcomer: int) -> int | None:
        """The rank that mirrors a newcomer's shards; None where nobody does."""
        mirrors = [stepper.mirror for stepper in self._here.belongings.steppers_of(key)]
        return mirrors[0].holder_of(newcomer) if mirrors and mirrors[0] is not None else None

    def _model_key(self, heir: Heir) -> ModelKey:
        """Of a model, or of a trainer's."""
        if isinstance(heir, ModelHeir):
            return heir.key
        assert isinstance(heir, TrainerHeir)
        return self._here.belongings.model_of(self._here.belongings.trainers[heir.number])

    def _cure(self, heir: Heir) -> str:
        """What to do now."""
        if isinstance(heir, TrainerHeir) and ModelHeir(self._model_key(heir)) not in self._lost:
            return _TRAINER_AGAIN
        return _AGAIN

    def _mark_lost(self) -> None:
        """On survivors: a trainer that cannot go on says so instead of waiting for ranks that do not have it."""
        if self._is_new:
            return
        ended = f"the trainer ended with rank{'s' * (len(self._newcomers) > 1)} {', '.join(map(str, self._newcomers))}"
        for heir, reason in self._lost.items():
            if isinstance(heir, TrainerHeir) and heir.number in self._here.belongings.trainers:
                cure = self._cure(heir)
                self._here.belongings.trainers[heir.number]._stepper.lost = f"{ended}: {reason}; {cure}"
        for stepper in strangers(self._here.belongings).values():
            if isinstance(stepper, Stepper) and not stepper.lost:
                stepper.lost = f"{ended}: no name of the notebook holds it; {_AGAIN}"

    def _report(self) -> dict[str, Any]:
        """Binds the names on newcomers."""
        here = self._here
        healed, lost, names = broadcast(self._named() if self._is_donor else None, self._survivors[0])
        found = _Attempt(lambda: {name: here.belongings.find(address) for name, address in healed.items()})
        if problem := _first(found.problem if self._is_new else ""):
            raise SessionError(f"a rank could not be healed: {problem}; {_AGAIN}")
        if self._is_new:
            here.namespace.update(found.value or {})
            here.namespace.update({name: Lost(f"{name} is lost: {reason}") for name, reason in lost.items()})
        reset = self._share_plain_values()
        known = set.intersection(*(gather(set(here.namespace))[rank] for rank in self._newcomers))
        missing = [name for name in names if name not in known and name not in lost]
        return {"healed": list(healed), "lost": lost, "missing": missing, "reset": reset}

    def _share_plain_values(self) -> list[str]:
        """Gives newcomers the numbers and lists that are the same on all others: losses, counters, settings.

        A replayed assignment has given them what these were at first; names that still have that are returned.
        """
        reports = gather(plain_values(self._here.namespace))
        values = agreed([reports[rank] for rank in self._survivors])
        if len(self._survivors) > 1:
            if self._is_new:
                self._here.namespace.update({name: pickle.loads(data) for name, data in values.items()})
            return []
        # of one survivor: they may be its own
        theirs = [reports[rank] for rank in self._newcomers]
        given = {"rank", "local_rank"}  # by the session
        return sorted(n for n in values.keys() - given if any(n in own and own[n] != values[n] for own in theirs))

    def _named(self) -> tuple[dict[str, Any], dict[str, str], list[str]]:
        """Names with the addresses of what was healed, names with why it was lost, and all of the user's names."""
        addresses = self._here.belongings.addresses()
        healed, lost, names = {}, {}, []
        for name, value in self._here.namespace.items():
            if name.startswith("_") or name in _SHELL_NAMES or isinstance(value, _DEFINED):
                continue
            names.append(name)
            if (address := addresses.get(id(value))) is None:
                continue
            heir = self._heir_at(address)
            if reason := self._lost.get(heir):
                lost[name] = reason if isinstance(heir, LoaderHeir) else f"{reason}; {self._cure(heir)}"
            else:
                healed[name] = address
        return healed, lost, names

    @staticmethod
    def _heir_at(address: tuple[Any, ...]) -> Heir:
        kind, key, *_ = address
        if kind in TRAINER_PARTS:
            return TrainerHeir(key)
        return LoaderHeir(key) if kind in LOADER_PARTS else ModelHeir(key)


def _gone(plan: Plan, heir: Heir, *, pieces: bool) -> str:
    """Why nobody has what a dead rank had."""
    if plan.dp == 1:
        return _ONLY_ONE
    if pieces:
        return _STATE_GONE if isinstance(heir, TrainerHeir) else _PIECES_GONE
    return _GONE


class _Attempt:
    """What a function gave, or why it failed: others wait to hear of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.value, self.problem = None, ""
        try:
            self.value = function()
        except Exception as problem:
            kind = "" if isinstance(problem, NbtrainError) else f"{type(problem).__name__}: "
            self.problem = f"{kind}{problem}"


def _first(*problems: str) -> str:
    """The first problem of any rank; "" without. Collective."""
    return next((problem for those in gather(problems) for problem in those if problem), "")
