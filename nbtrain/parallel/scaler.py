"""The scale of an fp16 loss, as data: what ranks end a step by, so that all of them have the same.

Gradients below 2^-24 are 0 in fp16. So the loss is multiplied before backward, and the gradients are divided again in
fp32. Where a gradient is not finite any more the scale was too high: the step is skipped, on all ranks, and the scale
halved; after many good steps it is doubled (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section
3.2; the constants are those of ``torch.amp.GradScaler``). Scales are powers of 2, which round nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbtrain.errors import GradientError

GROWTH_STEPS = 2000
"""Good steps in a row before the scale doubles."""

_SMALLEST = 2.0**-24


@dataclass(frozen=True)
class Scaling:
    """The state after a step.

    Attributes:
        scale: What the next loss is multiplied by.
        good_steps: Since the scale last changed.
        num_skipped: Steps in which the optimizer did not step, in all.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    num_skipped: int = 0

    def after(self, overflowed: bool) -> Scaling:
        """The state behind one more step.

        Raises:
            GradientError: No scale helps: gradients overflow though the loss is made smaller and smaller.
        """
        if overflowed:
            self._require_room()
            return Scaling(self.scale / 2, 0, self.num_skipped + 1)
        if self.good_steps + 1 == GROWTH_STEPS:
            return replace(self, scale=self.scale * 2, good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)

    def _require_room(self) -> None:
        if self.scale <= _SMALLEST:
            raise GradientError(
                f"gradients are not finite though the loss is scaled by {self.scale:g}: it is no overflow of fp16's "
                "range; look at the batch and the learning rate, or type precision=bf16"
            )
