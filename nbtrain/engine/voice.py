"""What one rank says for all that run the cell."""

from __future__ import annotations

import sys

from ipykernel.iostream import OutStream
from IPython.display import display

from nbtrain.events import FOR_ALL


def say_for_all(text: str) -> None:
    """Shows a text without a rank's label."""
    if isinstance(sys.stdout, OutStream):
        display({"text/plain": text}, raw=True, metadata=FOR_ALL)
    else:  # the cell keeps what is printed
        print(text)
