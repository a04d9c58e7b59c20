"""Boxes: they cover what a rank holds, and writing to them writes to the model."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from layouts import data, train, trainer
from ranks import run_ranks

from nbtrain.parallel.pieces import Box, Held, flat_boxes, held_optimizer, held_parameters


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes_in_order(shape: list[int], drawn: st.DataObject) -> None:
    numel = math.prod(shape)
    start = drawn.draw(st.integers(0, numel))
    end = drawn.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)

    boxes = list(flat_boxes(shape, start, end))

    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    elements = [int(number) for box in boxes for number in whole[_slices(box)].flatten()]
    assert elements == list(range(start, end))


def test_pieces_are_views_of_what_each_layout_holds() -> None:
    def on_rank() -> None:
        for spec in ("zero=1", "zero=3,dp_replicate=2", "tp=2,zero=3", "tp=2,zero=1"):
            _check(spec)

    run_ranks(on_rank, 4)


def _check(spec: str) -> None:
    subject = trainer(spec, seed=0)
    train(subject, subject.loader(data(), batch_size=16), 1)
    layout = subject._stepper.layout
    before = subject.state_dict()
    held = held_parameters(subject.model, layout)
    assert "head.weight" not in held, "tied: under its first name alone"
    _check_cover(spec, held.values())
    for one in held.values():
        whole = before[one.name]
        assert (one.shape, one.dtype) == (tuple(whole.shape), whole.dtype)
        for piece in one.pieces:
            assert torch.equal(piece.view, whole[_slices(piece.box)]), (spec, one.name)
            piece.view.add_(1)
    after = subject.state_dict()
    assert all(torch.equal(after[name], value + 1) for name, value in before.items())
    optimizer = held_optimizer(subject.optimizer, subject.model, layout)
    assert [group.options["weight_decay"] for group in optimizer.groups] == [0.1, 0.0]
    assert {name for group in optimizer.groups for name in group.names} == set(held) - {"seen"}
    for key in ("exp_avg", "exp_avg_sq"):
        moments = [entries[key] for entries in optimizer.state.values()]
        assert all(moment.shape == held[moment.name].shape for moment in moments)
        _check_cover(spec, moments)
    assert all(entries["step"].pieces[0].view == 1 for entries in optimizer.state.values())


def _check_cover(spec: str, held: Any) -> None:
    """All ranks' distinct boxes cover each tensor once."""
    own = {one.name: (one.shape, [piece.box for piece in one.pieces]) for one in held}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for name in set(itertools.chain.from_iterable(everyone)):
        parts = [part[name] for part in everyone if name in part]
        assert len({shape for shape, _ in parts}) == 1
        count = torch.zeros(parts[0][0], dtype=torch.int64)
        for box in {box for _, boxes in parts for box in boxes}:
            count[_slices(box)] += 1
        assert torch.equal(count, torch.ones_like(count)), (spec, name)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.starts, box.sizes, strict=True))


def test_what_is_held_names_its_tensor() -> None:
    def on_rank() -> list[Held]:
        subject = trainer(
            "zero=0",
            seed=0,
            make=lambda: torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last),
            loss_fn=torch.nn.functional.mse_loss,
        )
        held = held_parameters(subject.model, subject._stepper.layout)
        assert held["weight"].pieces[0].view.stride() == subject.model.weight.stride()
        return list(held)

    assert run_ranks(on_rank, 1) == [["weight", "bias"]]
