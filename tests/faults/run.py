"""Runs the fault matrix and the peers beside it, prints both tables and rewrites them in README.md.

``python tests/faults/run.py [--peers-only] [--peers FOLDER]``
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

import matrix
import peers
import torch
from contenders import install_nbdistributed
from table import conditions_text, rewrite

README = Path(__file__).parents[2] / "README.md"
CACHE = Path.home() / ".cache" / "nbtrain-benchmarks" / "nbdistributed"


class _Matrix:
    """Takes the matrix from the tests' run."""

    text = ""

    def pytest_terminal_summary(self, config: pytest.Config) -> None:
        self.text = matrix.render(config.stash[matrix.RESULTS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers-only", action="store_true", help="leave the matrix as it is")
    parser.add_argument("--peers", type=Path, default=CACHE, help="nbdistributed's own environment is made here")
    options = parser.parse_args()
    if not options.peers_only:
        plugin = _Matrix()
        if pytest.main(["-q", str(Path(__file__).parent)], plugins=[plugin]):
            sys.exit("the matrix has failures; README.md stays as it is")
        _put(plugin.text, "faults")
    if missing := install_nbdistributed(options.peers, torch.__version__):
        sys.exit(f"nbdistributed {missing}")
    _put(peers.table(), "faults of peers")


def _put(table: str, name: str) -> None:
    print(table)
    if not rewrite(README, f"{table}\n\n{conditions_text()}", name):
        print(f"{README} has no <!-- {name} --> markers and stays as it is", file=sys.stderr)


if __name__ == "__main__":
    main()
