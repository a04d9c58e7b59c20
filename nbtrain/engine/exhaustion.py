"""Out of memory on a rank: give back what the failed cell held, so that the next one can run."""

from __future__ import annotations

import gc

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU, or of the machine."""
    allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or allocator


def give_back() -> None:
    """Collect what is unreachable, and return the allocator's cache to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
