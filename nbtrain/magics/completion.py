"""Tab in a distributed cell completes names that live on the ranks. Nothing is created in the notebook for it."""

from __future__ import annotations

from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from nbtrain.cluster import session as sessions
from nbtrain.magics import auto

WAIT_S = 0.5  # a rank in a long C call answers late: then there are no completions


@context_matcher(identifier="nbtrain.ranks", priority=100.0)
def complete_on_ranks(context: CompletionContext) -> dict[str, Any]:
    """What rank 0 would complete at the cursor."""
    body = _body(context)
    if body is None or sessions._current is None:
        return {"completions": []}
    code, cursor = body
    reply = sessions._current.ask(0, "complete", WAIT_S, code=code, cursor=cursor)
    if not reply:
        return {"completions": []}
    start = len(code[: reply["cursor_start"]]) - len(code[: cursor - len(context.token)])
    return {"completions": [SimpleCompletion(context.token[: max(start, 0)] + text) for text in reply["matches"]]}


def install(shell: Any) -> None:
    if complete_on_ranks not in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.append(complete_on_ranks)


def remove(shell: Any) -> None:
    if complete_on_ranks in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(complete_on_ranks)


def _body(context: CompletionContext) -> tuple[str, int] | None:
    """The code of a distributed cell and the cursor in it; None for another cell."""
    from IPython.core.getipython import get_ipython

    lines = context.full_text.split("\n")
    cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
    if lines[0].lstrip().startswith("%%distributed"):
        skipped = len(lines[0]) + 1
        return (context.full_text[skipped:], cursor - skipped) if context.cursor_line > 0 else None
    if auto.is_on(get_ipython()) and auto.distribute([lines[0]])[0].startswith("%%distributed"):
        return context.full_text, cursor
    return None
