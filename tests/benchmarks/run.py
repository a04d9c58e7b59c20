"""Runs the benchmarks beside nbtrain's peers and rewrites the table in README.md.

``python tests/benchmarks/run.py [--only start,steps] [--quick] [--peers FOLDER]``

Numbers are of this machine and this moment; what holds elsewhere is the ratio to a peer that was measured in the same
run, in turns. Part of the benchmarks, or a quick run, is only printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import cells
import checkpoints
import memory_tree
import pipelines
import start
import steps
import torch
import update
from contenders import install_nbdistributed
from measure import Row
from table import conditions, render, rewrite

PRIVATE = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")  # no number may depend on them
README = Path(__file__).parents[2] / "README.md"
ALL = ["start", "cells", "steps", "pipelines", "update", "checkpoints", "memory"]
CACHE = Path.home() / ".cache" / "nbtrain-benchmarks" / "nbdistributed"


def main() -> None:
    for name in PRIVATE:
        os.environ.pop(name, None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options = _options()
    without_peers = set(options.only) <= {"steps", "pipelines", "update", "checkpoints", "memory"}
    missing = "" if without_peers else install_nbdistributed(options.peers, torch.__version__)
    benchmarks: dict[str, Callable[[], list[Row]]] = {
        "start": lambda: start.run(missing, rounds=2 if options.quick else 5),
        "cells": lambda: cells.run(missing, *((20, 1) if options.quick else (60, 3))),
        "steps": lambda: steps.run(rounds=4 if options.quick else 20),
        "pipelines": lambda: pipelines.run(rounds=4 if options.quick else 12),
        "update": lambda: update.run(*((2,) if options.quick else ())),
        "checkpoints": lambda: checkpoints.run(*((2,) if options.quick else ())),
        "memory": memory_tree.run,
    }
    rows = []
    for name in options.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += (found := benchmarks[name]())
        print(render(found), file=sys.stderr, flush=True)  # else an error in the next would take it away
    table = f"{render(rows)}\n\n{conditions()}"
    print(table)
    if options.only == ALL and not options.quick and not rewrite(README, table):
        print(f"{README} has no <!-- benchmarks --> markers and stays as it is", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=ALL, help="of " + ",".join(ALL))
    parser.add_argument("--quick", action="store_true", help="few repetitions, to try a change")
    parser.add_argument("--peers", type=Path, default=CACHE, help="nbdistributed's own environment is made here")
    options = parser.parse_args()
    unknown = [name for name in options.only if name not in ALL]
    if unknown:
        parser.error(f"--only {unknown[0]}: choose from {', '.join(ALL)}")
    return options


if __name__ == "__main__":
    main()
