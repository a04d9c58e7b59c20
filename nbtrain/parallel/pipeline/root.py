"""The forward of a model that is split: what its units do is up to a flow."""

from __future__ import annotations

from typing import Any

from nbtrain.errors import ModelError
from nbtrain.parallel.mixin import Mixin
from nbtrain.parallel.pipeline import flow

_CURE = (
    "the model is split over pipeline stages, and a rank has only some of its layers; call trainer.step or "
    "trainer.evaluate on all ranks (nt.Trainer(model, plan, ...)), or type pp=1 for a loop of your own"
)


class Root(Mixin):
    """Mixed into the class of a model that is split.

    Its forward gives what the flow lets out: the model's own output on the last stage, else what crosses.
    """

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if flow.is_losing():
            raise ModelError(
                "loss_fn goes through the model's parameters, and the last pipeline stage has its own only; compute "
                "the penalty in the model's forward, or use the optimizer's weight_decay"
            )
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]  # an nn.Module beside it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        conductor = flow.current()
        if conductor is None:
            raise ModelError(_CURE)
        run = super().forward  # type: ignore[misc]  # of the model's class
        return conductor.conduct(lambda: run(*args, **kwargs))
