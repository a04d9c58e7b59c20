"""`Report`: what `verify` compared, for people. It holds no tensor, so that a rank can send it to the notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from nbtrain.errors import ModelError
from nbtrain.plan import Plan

KINDS = ("weights", "loss", "gradient", "parameter", "buffer")
"""What is compared, in the order in which a fault shows: the weights before the first step, then each step's others."""


@dataclass(frozen=True)
class Row:
    """One tensor on one device against the plan.

    Attributes:
        step: From 1; 0 before the first.
        kind: One of `KINDS`.
        name: Of the parameter or buffer; "" of a loss.
        error: Largest absolute difference of an element, on the rank where it is largest. Infinite where only one side
            has the tensor, or where one is not finite.
        allowed: The error that rounding explains.
        factor: Where the plan's tensor is that of one device times a number, that number.
        ranks: Those where the error is larger than allowed.
        note: What is wrong, where no number says it.
    """

    step: int
    kind: str
    name: str
    error: float
    allowed: float
    factor: float | None = None
    ranks: tuple[int, ...] = ()
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """The error, in what is allowed."""
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)

    @property
    def place(self) -> str:
        """In words."""
        at = f" at step {self.step}"
        return {
            "weights": f"'{self.name}' before the first step",
            "loss": f"the loss{at}",
            "gradient": f"the gradient of '{self.name}'{at}",
        }.get(self.kind, f"'{self.name}' after step {self.step}")


@dataclass(frozen=True)
class Report:
    """The plan against one device.

    Attributes:
        plan: Resolved.
        world_size: Ranks.
        steps: Optimizer steps that were compared.
        rows: All comparisons, in the order in which they were made.
        notes: What was changed or noticed, in words.
        traits: What each parameter is: "tied", "norm", "bias", "fused qkv", "in NAME".
        likely_cause: Of the first difference; "" where there is none.
    """

    plan: Plan
    world_size: int
    steps: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    traits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    likely_cause: str = ""

    @property
    def ok(self) -> bool:
        """Whether all that was compared is the same but for rounding."""
        return all(row.ok for row in self.rows)

    @property
    def differences(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.ok)

    @property
    def first_difference(self) -> Row | None:
        """Of the first step and kind that differ, in the model's order."""
        return next(iter(self.differences), None)

    def raise_(self) -> Report:
        """The report itself where the plan gives one device's numbers.

        Raises:
            ModelError: It does not; the message is the report.
        """
        if not self.ok:
            raise ModelError(str(self))
        return self

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self._table, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in self._table
        ]
        return "\n".join([self._verdict, *self._reasons, *(f"  {line}" for line in table), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = "var(--jp-success-color1, #1a7f37)" if self.ok else "var(--jp-error-color1, #cf222e)"
        head, *body = (
            "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in line) for line in self._table
        )
        table = f"<table><tr>{head.replace('td', 'th')}</tr>{''.join(f'<tr>{line}</tr>' for line in body)}</table>"
        words = "".join(f"<div>{html.escape(line)}</div>" for line in (*self._reasons, *self.notes))
        return f"<div style='color:{colour};font-weight:bold'>{html.escape(self._verdict)}</div>{words}{table}"

    @property
    def _verdict(self) -> str:
        what = f"{self.plan} on {self.world_size} rank{'s' * (self.world_size > 1)}"
        first = self.first_difference
        if first is None:
            steps = f"{self.steps} step{'s' * (self.steps > 1)}"
            return f"verified: {what} gives the numbers of one device ({steps}, {len(self.rows)} comparisons)"
        wrong = first.note or f"is off by {first.error:.2g} where rounding explains {first.allowed:.2g}"
        return f"NOT verified: {what} differs from one device: {first.place} {wrong}"

    @property
    def _reasons(self) -> list[str]:
        if self.ok:
            return []
        return [f"likely cause: {self.likely_cause}", f"{len(self.differences)} of {len(self.rows)} comparisons differ"]

    @property
    def _table(self) -> list[tuple[str, ...]]:
        """The largest error of each kind."""
        lines: list[tuple[str, ...]] = [("kind", "compared", "differ", "largest error", "allowed", "where")]
        for kind in KINDS:
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                worst = max(rows, key=lambda row: row.severity)
                differ = sum(not row.ok for row in rows)
                numbers = f"{worst.error:.1e}", f"{worst.allowed:.1e}"
                where = " ".join(filter(None, (worst.name, f"step {worst.step}" if worst.step else "")))
                lines.append((kind, str(len(rows)), str(differ or "none"), *numbers, where))
        return lines
