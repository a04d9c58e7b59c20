"""The definitions of earlier cells, which a rank that takes a dead one's place can run without side effects.

Imports, functions, classes, and assignments that call nothing (``lr = 1e-3``, ``F = torch.nn.functional``). Everything
else computed, printed, trained or talked to other ranks, and would do so again.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PLAIN = (
    ast.Constant,
    ast.Name,
    ast.Attribute,
    ast.Tuple,
    ast.List,
    ast.Dict,
    ast.Set,
    ast.UnaryOp,
    ast.BinOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)


@dataclass
class Replay:
    """What was defined where, in order."""

    cells: list[tuple[tuple[int, ...], str, str, int]] = field(default_factory=list)

    def remember(self, ranks: Sequence[int], source: str, label: str, offset: int) -> None:
        """A cell was sent to ``ranks``; ``source`` is Python, its magics transformed."""
        text = definitions(source)
        if text and (tuple(ranks), text, label, offset) not in self.cells:
            self.cells.append((tuple(ranks), text, label, offset))

    def on(self, rank: int) -> list[tuple[str, str, int]]:
        """Source, label and offset of what ``rank`` was told, in order."""
        return [(text, label, offset) for ranks, text, label, offset in self.cells if rank in ranks]


def definitions(source: str) -> str:
    """``source`` with blank lines in the place of all that is no definition; empty if nothing is left.

    Line numbers stay, so that tracebacks name the lines of the notebook's cell.
    """
    lines = source.splitlines()
    kept: dict[int, str] = {}
    for node in ast.parse(source).body:
        if _defines(node):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            segment = range(first, (node.end_lineno or node.lineno) + 1)
            kept.update({number: lines[number - 1] for number in segment} if _stands_alone(node, lines) else {})
            if not _stands_alone(node, lines):
                kept[first] = "; ".join(filter(None, [kept.get(first, ""), ast.unparse(node)]))
    return "\n".join(kept.get(number, "") for number in range(1, len(lines) + 1)) if kept else ""


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Try):  # a fallback for an import that may be missing
        return all(_defines(inner) or isinstance(inner, ast.Pass) for inner in [*node.body, *_handled(node)])
    if isinstance(node, ast.Assign):
        return _calls_nothing(node.value) and all(map(_is_name, node.targets))
    if isinstance(node, ast.AnnAssign):
        return node.value is not None and _calls_nothing(node.value) and _is_name(node.target)
    return isinstance(node, _DEFINITIONS)


def _handled(node: ast.Try) -> list[ast.stmt]:
    return [*(inner for handler in node.handlers for inner in handler.body), *node.orelse, *node.finalbody]


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) or (isinstance(target, ast.Tuple) and all(map(_is_name, target.elts)))


def _calls_nothing(value: ast.expr) -> bool:
    return isinstance(value, ast.Lambda) or all(isinstance(part, _PLAIN) for part in ast.walk(value))


def _stands_alone(node: ast.stmt, lines: list[str]) -> bool:
    """Whether no other statement shares its lines (``import os; run()``)."""
    before = lines[node.lineno - 1].encode()[: node.col_offset].strip()
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].split(b"#")[0].strip()
    return not before and not after
