"""Trees of tensors arrive as they were, in batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import rank
from ranks import run_ranks

from nbtrain.parallel import transfer

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex128)
SHAPES = ((), (3,), (0, 4), (2, 3), (1,))


def tree(seed: int, num: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [(torch.randn(SHAPES[index % 5], generator=generator) * 9).to(DTYPES[index % 6]) for index in range(num)]
    return {"tensors": tensors, "turned": torch.arange(6.0).view(2, 3).T, "else": [seed, None, {"text": "x"}]}


def same(got: Any, expected: Any) -> None:
    assert got["else"] == expected["else"]
    for mine, theirs in zip([*got["tensors"], got["turned"]], [*expected["tensors"], expected["turned"]], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("batch_bytes", [1, 40, 2**20])
def test_trees_travel_whole(batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BATCH_BYTES", batch_bytes)

    def on_rank() -> None:
        if rank() == 0:
            transfer.send(tree(0, 40), 2)
            transfer.send({"tensors": []}, 2)
            transfer.send([torch.empty(0, 3)], 2)
        if rank() == 2:
            same(transfer.receive(0), tree(0, 40))
            assert transfer.receive(0) == {"tensors": []}
            assert transfer.receive(0)[0].shape == (0, 3)
        # of different lengths, and one sends none
        mine = tree(rank(), 7 * rank() + 2) if rank() != 1 else None
        got = transfer.pass_along(mine, dist.group.WORLD)
        before = (rank() - 1) % 3
        if before == 1:
            assert got is None
        else:
            same(got, tree(before, 7 * before + 2))

    run_ranks(on_rank, 3)
