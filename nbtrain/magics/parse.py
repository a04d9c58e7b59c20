"""The magics' lines, taken apart. An error is one line that names the nearest valid word."""

from __future__ import annotations

import argparse
import keyword
import shlex
from typing import Any, NoReturn

from nbtrain.errors import UsageError, nearest

VERBS = ("start", "status", "stop", "restart", "interrupt", "where", "guard", "push", "pull", "auto")
SHELL_NAMES = {"In", "Out", "get_ipython", "exit", "quit", "open"}  # IPython's, not the user's
LATER = ("resize", "export", "debug")  # verbs of later releases


class Parser(argparse.ArgumentParser):
    """argparse that raises `UsageError` instead of leaving the process."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; for all options type %distributed?")

    def parse(self, words: list[str]) -> argparse.Namespace:
        """Parse ``words``; an unknown option is answered with the nearest one."""
        known, unknown = self.parse_known_args(words)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            hint = nearest(unknown[0].split("=")[0], options) if options else "it takes no options"
            raise UsageError(f"{self.prog} has no option {unknown[0]!r}; {hint}")
        return known


class _Once(argparse.Action):
    """An option that is given twice is a mistake, not a choice of the last."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given: set[str | None] = getattr(namespace, "_given", set())
        if option_string in given:
            raise UsageError(f"{parser.prog}: {option_string} is given twice; give it once, e.g. {option_string} 0,2")
        namespace._given = given | {option_string}
        setattr(namespace, self.dest, values)


def split(line: str) -> list[str]:
    """The words of a magic's line, with quotes as in a shell.

    Raises:
        UsageError: a quote is not closed.
    """
    try:
        return shlex.split(line, comments=True)
    except ValueError as problem:
        raise UsageError(f"{line.strip()!r}: {problem}; close the quote") from None


def cell_options(line: str) -> argparse.Namespace:
    """The options of ``%%distributed``."""
    parser = Parser("%%distributed")
    parser.add_argument("-n", type=_count)
    parser.add_argument("--plan")
    parser.add_argument("--parallelize", type=_names, default=[])
    parser.add_argument("-r", "--ranks", default="all")
    parser.add_argument("-o", "--out", type=_name)
    parser.add_argument("--push", type=_names, default=[])
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--no-block", action="store_true")
    parser.add_argument("--name", type=_name)
    parser.add_argument("--timeout", type=_seconds)
    parser.add_argument("--watch")
    options = parser.parse(split(_join_rank_spec(line)))
    _check_together(options)
    return options


def start_options(verb: str, words: list[str]) -> dict[str, Any]:
    """The options of ``%distributed start`` and ``restart``, without those that were not given."""
    parser = Parser(f"%distributed {verb}")
    parser.add_argument("-n", type=_count)
    parser.add_argument("--gpus")
    parser.add_argument("--backend")
    parser.add_argument("--threads", type=_count)
    parser.add_argument("--launcher")
    parser.add_argument("--hang-after", type=_seconds)
    if verb == "start":
        parser.add_argument("--hosts")
    else:
        parser.add_argument("-r", "--ranks")
        parser.add_argument("--replay", action="store_true", default=None)
    options = parser.parse(split(_join_rank_spec(shlex.join(words))))
    if getattr(options, "hosts", None):
        raise NotImplementedError("--hosts comes with the SSH launcher in a later release; start ranks on this machine")
    return {name: value for name, value in vars(options).items() if value is not None and name != "_given"}


def rank_option(verb: str, words: list[str]) -> tuple[list[str], str]:
    """The names and the ranks of ``push``, ``pull`` and ``interrupt``."""
    parser = Parser(f"%distributed {verb}")
    parser.add_argument("-r", "--ranks", default="all")
    parser.add_argument("names", nargs="*")
    options = parser.parse(split(_join_rank_spec(shlex.join(words))))
    names = [name for word in options.names for name in _names(word)]
    return names, options.ranks


def verb(word: str) -> str:
    """``word`` if it is a verb.

    Raises:
        UsageError: it is not; the nearest is named.
        NotImplementedError: it comes in a later release.
    """
    if word in LATER:
        raise NotImplementedError(f"%distributed {word} comes in a later release; now there are {', '.join(VERBS)}")
    if word not in VERBS:
        raise UsageError(f"%distributed has no verb {word!r}; {nearest(word, VERBS)}")
    return word


def _check_together(options: argparse.Namespace) -> None:
    if options.watch:
        raise NotImplementedError("--watch comes in a later release; run the cell without it")
    if options.out and options.no_block:
        raise UsageError("-o has no value before the cell ends; with --no-block use --name h, then h.result()")
    if options.local and options.no_block:
        raise UsageError("--local runs after the ranks have finished; leave --no-block away")
    if options.name and not options.no_block:
        raise UsageError("--name is the handle of a cell that does not block; add --no-block")


def _join_rank_spec(line: str) -> str:
    """``-r -1`` as ``-r=-1``: argparse takes a leading minus for an option."""
    words = split(line)
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("-r", "--ranks") and word[:1] == "-" and word[1:2].isdigit():
            joined[-1] = f"--ranks={word}"
        else:
            joined.append(word)
    return shlex.join(joined)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1; type e.g. 4")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds; type e.g. 30")
    return seconds


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a Python name; type e.g. result")
    return text


def _names(text: str) -> list[str]:
    return [_name(part.strip()) for part in text.split(",") if part.strip()]
