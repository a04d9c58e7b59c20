"""The magics: parse, call the session, render."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class
from IPython.display import display

from nbtrain.cluster import session as sessions
from nbtrain.cluster.cell import Handle
from nbtrain.cluster.failures import ranks_text
from nbtrain.cluster.session import Session, check_syntax
from nbtrain.errors import CellInterrupted, NbtrainError, UsageError, nearest
from nbtrain.magics import auto, parse
from nbtrain.magics.help import HELP


@magics_class
class DistributedMagics(Magics):
    """``%distributed VERB`` steers the session; ``%%distributed`` runs a cell on its ranks."""

    @line_cell_magic
    def distributed(self, line: str, cell: str | None = None) -> Any:
        try:
            if cell is not None:
                return self._run_cell(parse.cell_options(line), cell)
            words = parse.split(line)
            verb = parse.verb(words[0]) if words else "status"
            return getattr(self, f"_{verb}")(words[1:])
        except (NbtrainError, NotImplementedError) as problem:
            raise in_one_line(problem) from None
        except CellInterrupted:
            raise
        except KeyboardInterrupt:
            raise CellInterrupted("interrupted") from None

    distributed.__doc__ = HELP

    @cell_magic
    def local(self, line: str, cell: str) -> None:
        """Run a cell in the notebook's own kernel while ``%distributed auto`` is on."""
        self.shell.run_cell(cell).raise_error()

    # -- the cell ------------------------------------------------------------------------------------------------------

    def _run_cell(self, options: argparse.Namespace, source: str) -> Handle | None:
        check_cell(source)
        session = self._session(options)
        label, offset = self._place()
        answer = session.run(
            source,
            options.ranks,
            plan=options.plan,
            parallelize=options.parallelize,
            push=self._local_values(options.push),
            block=not options.no_block,
            name=options.name or "",
            timeout=options.timeout,
            values=bool(options.out),
            label=label,
            offset=offset,
        )
        if options.no_block:
            return self._present(answer, options.name or "")
        if options.out:
            self.shell.user_ns[options.out] = answer
        if options.local:
            self.shell.run_cell(source).raise_error()
        return None

    def _session(self, options: argparse.Namespace) -> Session:
        """The session that runs; the first cell starts it."""
        session = sessions.current_or_new()
        if not session.started:
            session.start(options.n)
            print(f"{session.headline()} started in {session.start_seconds:.1f} s")
        elif options.n not in (None, session.world_size):
            raise UsageError(
                f"-n {options.n}: {session.headline()} run already; leave -n away, choose ranks with -r, or type "
                f"%distributed restart -n {options.n}, which loses what they hold"
            )
        return session

    def _place(self) -> tuple[str, int]:
        """What the notebook calls this cell, and how many of its lines precede the code."""
        number = len(self.shell.history_manager.input_hist_parsed) - 1  # the count is the next cell's by now
        return f"Cell In[{number}]", 0 if auto.is_on(self.shell) else 1

    def _local_values(self, names: list[str]) -> dict[str, Any]:
        own = self.shell.user_ns
        for name in names:
            if name not in own:
                visible = [key for key in own if not (key.startswith("_") or key in parse.SHELL_NAMES)]
                raise UsageError(f"push: there is no {name!r} in the notebook; {nearest(name, visible)}")
        return {name: own[name] for name in names}

    def _present(self, handle: Handle, name: str) -> Handle | None:
        """Bind the handle, or return it; either way a line below the cell follows its state."""
        shown = display(handle, display_id=True)
        handle.follow(lambda: shown.update(handle) if shown is not None else None)
        if not name:
            return None
        self.shell.user_ns[name] = handle
        return None

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def _start(self, words: list[str]) -> None:
        options = parse.start_options("start", words)
        session = sessions.current_or_new()
        again = session.started
        session.start(**options)
        print(session.headline() + (" run already" if again else f" started in {session.start_seconds:.1f} s"))

    def _restart(self, words: list[str]) -> None:
        session = sessions.current_or_new()
        options = parse.start_options("restart", words)
        session.restart(**options)
        if options.get("ranks"):
            return  # it has said what became of what they held
        print(f"{session.headline()} started in {session.start_seconds:.1f} s; what the ranks held before is gone")

    def _stop(self, words: list[str]) -> None:
        parse.Parser("%distributed stop").parse(words)
        session = sessions.current_or_new()
        print("the ranks have stopped" if session.started else "no ranks run")
        session.stop()

    def _status(self, words: list[str]) -> None:
        parse.Parser("%distributed status").parse(words)
        sessions.current_or_new().status().show()

    def _interrupt(self, words: list[str]) -> None:
        _, ranks = parse.rank_option("interrupt", words)
        busy = sessions.session().interrupt(ranks)
        print(f"interrupted {ranks_text(busy)}" if busy else "no rank runs a cell")

    def _where(self, words: list[str]) -> None:
        parse.Parser("%distributed where").parse(words)
        sessions.current_or_new().where().show()

    def _guard(self, words: list[str]) -> None:
        if len(words) != 1:
            raise UsageError("type %distributed guard on, guard off, or guard cells, which is the default")
        sessions.current_or_new().guard(words[0])
        print(f"guard: {words[0]}")

    def _push(self, words: list[str]) -> None:
        names, ranks = parse.rank_option("push", words)
        if not names:
            raise UsageError("push what? type e.g. %distributed push data, labels")
        sessions.current_or_new().push(self._local_values(names), ranks)

    def _pull(self, words: list[str]) -> None:
        names, ranks = parse.rank_option("pull", words)
        if not names:
            raise UsageError("pull what? type e.g. %distributed pull loss")
        session = sessions.session()
        self.shell.user_ns.update({name: session.pull(name, ranks) for name in names})

    def _auto(self, words: list[str]) -> None:
        if words not in (["on"], ["off"]):
            raise UsageError("type %distributed auto on, or %distributed auto off")
        if words == ["on"]:
            auto.install(self.shell)
            print("every cell now runs on the ranks; begin one with %%local to run it here")
        else:
            auto.remove(self.shell)
            print("cells run here again; begin one with %%distributed to run it on the ranks")


def in_one_line(problem: Exception) -> Exception:
    """Make IPython show ``problem`` without frames: none of them is the user's. Errors of ranks show their own."""
    if not hasattr(problem, "_render_traceback_"):
        line = f"{type(problem).__name__}: {problem}"
        problem._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
    return problem


def check_cell(source: str) -> None:
    """Refuse what is not Python in one line, before any rank sees it."""
    if not source.strip():
        raise UsageError("the cell is empty; write what the ranks shall run below %%distributed")
    try:
        check_syntax(source)
    except SyntaxError as problem:
        place = f"line {(problem.lineno or 0) + 1}" if problem.lineno else "the cell"
        text = f": {problem.text.strip()}" if problem.text else ""
        raise UsageError(f"the cell is not Python, {place}{text}  ({problem.msg}); nothing ran") from None
