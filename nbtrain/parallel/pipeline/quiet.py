"""torch logs at length what is raised anyway."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(logger: logging.Logger) -> Iterator[None]:
    """``logger`` says nothing inside."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
