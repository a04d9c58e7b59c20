"""How far a rank is in a training step: what ranks compare when they go on after an interruption."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Stage(enum.Enum):
    """::

        COMPUTING --(own backward done)--> READY --(all ranks ready; optimizer)--> STEPPED
            ^                                                                         |
            +-------------------------------- next step ------------------------------+

    A rank that left READY knows that all others reached it.
    """

    COMPUTING = "computing"
    READY = "gradients ready"
    STEPPED = "stepped"


@dataclass(frozen=True)
class Phase:
    """``Phase(STEPPED, k)``: k steps are done. ``COMPUTING`` and ``READY`` name the step that is under way."""

    stage: Stage
    step: int

    @property
    def num_steps(self) -> int:
        """Optimizer steps done."""
        return self.step if self.stage is Stage.STEPPED else self.step - 1
