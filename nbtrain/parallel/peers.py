"""Tensor- and pipeline-parallel peers compute one batch together: it must be the same on all of them."""

from __future__ import annotations

import hashlib
import pickle

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from nbtrain.errors import BatchError, ModelError, UsageError
from nbtrain.parallel.batch import Batch
from nbtrain.parallel.exchange import all_reduce
from nbtrain.parallel.layout import Layout


def require_same_batch(batch: Batch, doing: str, layout: Layout, device: torch.device, problem: str = "") -> None:
    """Raises on every peer when they do not do the same with the same batch, in shape and in any bit. Collective, 56
    bytes an axis; without peers it moves nothing.

    Fed different data, peers would multiply parts of one sample with parts of another; with different shapes gloo
    ends the process. So this comes before forward.

    Args:
        batch: This rank's.
        doing: What this rank does with it, in words.
        layout: Says who the peers are.
        device: What their groups move.
        problem: Why this rank cannot take a step; "" where it can.

    Raises:
        BatchError: Batches differ.
        ModelError: Some peer cannot take the step.
        UsageError: Peers do different things.
    """
    for axis, peers in (("tensor", layout.peers), ("pipeline", layout.stages)):
        if peers is not None:
            _require_same(batch, doing, axis, peers, device, problem)
    if problem:
        raise ModelError(problem)


def _require_same(
    batch: Batch, doing: str, axis: str, peers: dist.ProcessGroup, device: torch.device, problem: str
) -> None:
    shape, content = _digests(batch)
    act = _number(hashlib.blake2b(doing.encode(), digest_size=8))
    span = torch.tensor([shape, -shape, content, -content, act, -act, bool(problem)], device=device)
    all_reduce(span, peers, largest=True)
    top_shape, bottom_shape, top, bottom, top_act, bottom_act, refused = span.tolist()
    if refused:
        raise ModelError(problem or "another rank of this model cannot take a step, and says why")
    ranks = ", ".join(map(str, dist.get_process_group_ranks(peers)))
    if top_act != -bottom_act:
        raise UsageError(
            f"{axis}-parallel ranks {ranks} compute one batch together, and do not all do the same with it: rank "
            f"{dist.get_rank()} is in {doing}; make every rank come to the same calls in one order"
        )
    if top_shape == -bottom_shape and top == -bottom:
        return
    what = "another batch" if top_shape == -bottom_shape else "a batch of another shape"
    raise BatchError(
        f"{axis}-parallel ranks {ranks} compute one batch together, and some got {what}; give them the same: "
        "trainer.loader(dataset, batch_size=...) does"
    )


def _digests(batch: Batch) -> tuple[int, int]:
    """Of shapes and dtypes, and of all bytes: 62 bits each."""
    leaves, tree = tree_flatten((batch.positional, dict(batch.named)))
    shapes, content = [str(tree)], hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            shapes.append(f"{tuple(leaf.shape)} {leaf.dtype}")
            content.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            content.update(_bytes(leaf))
    return _number(hashlib.blake2b("|".join(shapes).encode(), digest_size=8)), _number(content)


def _bytes(value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:  # an object of the user's own: its bytes say nothing
        return type(value).__name__.encode()


def _number(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "big") >> 2
