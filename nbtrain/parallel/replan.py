"""`replan`: a trainer's model laid out by another plan between two steps, with everything that training has made of it.

::

    check      the plan, the model, the optimizer, the loaders
    build      the new layout beside the old one, from the blueprint: memory, buffers, what tp cuts
    move       weights and optimizer state, some tensors at a time (`nbtrain.parallel.moving`)
    agree      all ranks hold all of the new layout
    switch     trainer, optimizer, loaders and names take it, and the old one's memory goes; not interruptible

Up to the switch the old layout is whole: whatever raises, an interrupt too, the trainer goes on in it. A rank that is
cut off in the agreement, behind which another has switched, switches when groups are formed again
(`nbtrain.parallel.live`): it holds all of the new layout too.

Where both layouts do not fit into memory, the old one waits in files and goes before the new one is made. An interrupt
then waits for the end, and a rank that dies takes the trainer with it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.errors import UsageError, nearest
from nbtrain.interrupts import uninterrupted
from nbtrain.parallel import live, preflight, spill, structure, transplant
from nbtrain.parallel import mesh as meshes
from nbtrain.parallel.cell import require_plan, say
from nbtrain.parallel.draft import Draft, by_key, together
from nbtrain.parallel.layout import Layout
from nbtrain.parallel.mirror import require_mirrorable
from nbtrain.parallel.moving import Catalog, Key, Move, Traffic, catalog_of
from nbtrain.parallel.optimizer import require_elementwise, trained
from nbtrain.parallel.pieces import Held, held_optimizer, held_parameters
from nbtrain.parallel.retire import inner, rebind, retire
from nbtrain.parallel.stepper import Stepper
from nbtrain.parallel.successors import loaders_to_tell, require_alone, require_loaders_fit
from nbtrain.parallel.tensor.random import Draws
from nbtrain.parallel.transfer import gather
from nbtrain.plan import Plan
from nbtrain.plan.footprint import format_bytes

if TYPE_CHECKING:
    from nbtrain.parallel.trainer import Trainer

VIAS = ("auto", "memory", "disk")
Namespaces = tuple[dict[str, Any], ...]


def replan(trainer: Trainer, plan: Plan | str, via: str, probe: Any, namespaces: Namespaces) -> None:
    """See `Trainer.replan`.

    Args:
        trainer: Its layout becomes another.
        plan: Of that.
        via: One of `VIAS`.
        probe: As of `parallelize`.
        namespaces: Where names may hold the old model.
    """
    plan = _resolved(plan)
    if via not in VIAS:
        raise UsageError(f"via={via!r} must be one of {', '.join(map(repr, VIAS))}; {nearest(str(via), VIAS)}")
    stepper = trainer._stepper
    if stepper.layout.mesh is None:
        _require_no_change(plan, stepper.layout)
        return
    assert dist.group.WORLD is not None, "a mesh has groups"
    preflight.check_same_options(dist.group.WORLD, plan=plan, via=via, num_steps=trainer.num_steps)
    stepper.rest()
    if plan == stepper.layout.plan:
        say(f"the model is laid out by {plan!r} already")
        return
    change = Change(trainer, plan, namespaces)
    try:
        change.prepare(probe, via)
    except BaseException:
        change.drop()
        raise
    say(change.settle())
    stepper.mirror_again()


class Change:
    """From the layout that a trainer has to another.

    Args:
        trainer: Between two steps.
        plan: Resolved.
        namespaces: Where names may hold the old model.
    """

    def __init__(self, trainer: Trainer, plan: Plan, namespaces: Namespaces) -> None:
        self._begun = time.perf_counter()
        self._trainer, self._plan, self._namespaces = trainer, plan, namespaces
        self._stepper: Stepper = trainer._stepper
        self._traffic = Traffic()
        self._done = False

    def prepare(self, probe: Any, via: str) -> None:
        """The new layout, with all numbers. Collective; nothing of the trainer changes, but where files are needed."""
        old, estate = self._describe()
        catalog = catalog_of(old)
        changes = together(lambda: structure.changes_of(self._stepper.layout, self._trainer.model))
        self._draft = Draft(self._structure(catalog, old), self._trainer.optimizer, estate, catalog)
        self._draft.begin(self._layout(), probe)
        if self._is_beside(via):
            self._fill(old)
        else:
            self._fill_from_files(old)
        together(lambda: changes.give(self._draft.model))

    def _describe(self) -> tuple[dict[Key, Held], transplant.Estate]:
        """What this rank has now, and what all know of the optimizer. Its views keep the memory that they are of."""
        weights, state = together(self._check)
        buffers = structure.held_buffers(inner(self._trainer.model))
        return {**by_key(weights), **buffers, **transplant.tensors_of(state)}, transplant.estate_of(state)

    def _structure(self, catalog: Catalog, old: dict[Key, Held]) -> nn.Module:
        """With its buffers: what tp cuts is found in a forward."""
        layout, model = self._stepper.layout, inner(self._trainer.model)
        module = together(lambda: structure.build(layout, model, catalog, self._device))
        self._buffers = structure.held_buffers(module)
        self._move({key: catalog[key] for key in self._buffers if key in catalog}, old, self._buffers)
        return module

    def _is_beside(self, via: str) -> bool:
        """Whether both layouts are in memory at once; else the new one was rehearsed: it is known to be possible."""
        if via == "memory" or (via == "auto" and spill.fits(self._draft.most_bytes, self._device)):
            return True
        needed = self._draft.rehearse()
        return via == "auto" and spill.fits(needed, self._device)

    def _fill(self, old: dict[Key, Held]) -> None:
        new = self._draft.lay_out()
        rest = {key: entry for key, entry in self._draft.catalog.items() if key not in self._buffers}
        self._move(rest, old, {key: held for key, held in new.items() if key not in self._buffers})

    def _fill_from_files(self, old: dict[Key, Held]) -> None:
        """The old layout goes first: a trainer that is cut off behind that is lost."""
        spill.require_disk(spill.num_bytes(old.values()))
        with tempfile.TemporaryDirectory(prefix="nbtrain-replan-") as folder:
            files = together(lambda: spill.write(old, Path(folder) / str(meshes.rank())))
            old.clear()
            with uninterrupted():
                try:
                    self._trainer.optimizer.state.clear()
                    retire(self._trainer.model, self._stepper.layout)
                    self._fill(files)
                except BaseException as problem:
                    self._stepper.lost = (
                        f"the trainer was cut off while its layout changed through files ({problem}); make it again on "
                        "all ranks, and load the last checkpoint"
                    )
                    raise
                finally:
                    files.clear()  # else Windows could not delete the file

    def settle(self) -> str:
        """All ranks agree, and switch; what there is to tell. Collective."""
        live.track_steps(self)
        self._trainer._change = self  # whoever is cut off here hears what became of it when groups are formed again
        reports = gather((self._traffic, time.perf_counter() - self._begun))
        sent = sum(traffic.sent_bytes for traffic, _ in reports)
        kept = sum(traffic.kept_bytes for traffic, _ in reports)
        seconds = max(seconds for _, seconds in reports)
        told = (
            f"laid out anew at step {self._stepper.phase.num_steps}, {self._stepper.layout.plan!r} -> {self._plan!r}: "
            f"{format_bytes(sent)} moved between ranks, {format_bytes(kept)} within, in {seconds:.2f} s"
        )
        self._switch(told)
        return told

    def standing(self) -> bool:
        """Whether this rank has switched."""
        return self._done

    def agree(self, standings: list[bool]) -> None:
        """Switches too where another rank has switched; else goes on as it is."""
        if any(standings) and not self._done:
            self._switch(f"laid out anew by {self._plan!r}")
        elif not self._done:
            self.drop()

    def drop(self) -> None:
        """Lets go of everything: a notebook keeps the last traceback, and a trainer its last change."""
        if "_draft" in vars(self):
            self._draft.drop()
        done = self._done
        vars(self).clear()
        self._done = done

    def __getstate__(self) -> dict[str, Any]:
        # a trainer on its way to a new rank brings it along
        return {"_done": True}

    def _check(self) -> tuple[dict[str, Held], Any]:
        """Everything that can be known before; this rank's part of the model and of the optimizer's state."""
        trainer, layout, plan = self._trainer, self._stepper.layout, self._plan
        structure.check(layout)
        require_alone(self._stepper)
        if layout.compile and plan.tp > 1:
            raise UsageError(
                f"the model's blocks are compiled (compile={layout.compile!r}), and torch cannot compile layers that "
                f"are cut (tp={plan.tp}); make the trainer without compile"
            )
        if plan.tp > 1:
            require_elementwise(trainer.optimizer)
        if self._stepper.redundancy and plan.dp_shard > 1 and plan.zero and plan.dp_replicate == 1:
            require_mirrorable(trainer.optimizer)
        preflight.check_apart(inner(trainer.model))
        preflight.check_model(structure.blueprint_of(layout), plan, has_values=False)
        require_loaders_fit(self._stepper, plan)
        state = held_optimizer(trainer.optimizer, trainer.model, layout)
        return held_parameters(trainer.model, layout), state

    def _layout(self) -> Layout:
        """Of the new plan, with what stays of the old one. Collective: a mesh may have to be built."""
        old, plan = self._stepper.layout, self._plan
        new = Layout(plan, meshes.build_mesh(plan), compile=old.compile, ddp=old.ddp, blueprint=old.blueprint)
        if (plan.tp > 1 or plan.pp > 1) and old.draws is not None:
            coordinate = meshes.data_coordinate(plan, meshes.rank())
            new.draws = Draws(old.draws.seed, coordinate, old.draws.step, old.draws.forwards)
        alike = all(
            getattr(plan, name) == getattr(old.plan, name) for name in ("tp", "tp_plan", "sequence_parallel", "pp")
        )
        new.tensor = old.tensor if alike else None
        return new

    def _move(self, catalog: Catalog, old: dict[Key, Held], new: dict[Key, Held]) -> None:
        self._traffic += Move(catalog, old, new, self._device).run()

    @property
    def _device(self) -> torch.device | None:
        return meshes.device_of(self._stepper.layout.mesh)

    def _switch(self, told: str) -> None:
        """The trainer has the new layout. Moves nothing."""
        trainer, stepper, draft = self._trainer, self._stepper, self._draft
        with uninterrupted():
            old_model, old_layout = trainer.model, stepper.layout
            loaders = loaders_to_tell(stepper, self._plan)
            transplant.hand_over(trainer.optimizer, draft.twin)
            trainer.model, trainer.plan, trainer._told = draft.model, self._plan, told
            stepper.go_on(draft.model, draft.layout, trained(draft.model, trainer.optimizer))
            for loader in loaders:
                loader.replan(self._plan)
            rebind((vars_of_main(), *self._namespaces), old_model, draft.model)
            if not old_layout.gone:
                retire(old_model, old_layout)
            self._done = True
            self.drop()


def vars_of_main() -> dict[str, Any]:
    """The notebook's names on this rank, or a script's."""
    import __main__

    return vars(__main__)


def _resolved(plan: Plan | str) -> Plan:
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    require_plan(plan)
    plan.require_supported()
    return plan.resolve(meshes.world_size())


def _require_no_change(plan: Plan, layout: Layout) -> None:
    if plan != layout.plan:
        raise UsageError(
            f"the model is on one device without process groups, and {layout.plan!r} cannot become {plan!r} there; "
            "start ranks (%distributed start -n 4), or make the model and the trainer again"
        )
