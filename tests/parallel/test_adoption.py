"""Meshes outlive their groups, and a newcomer gets them without forming a group."""

import pytest
import torch
import torch.distributed as dist
from lives import Life, die, run_lives
from ranks import run_ranks
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import nbtrain as nt
from nbtrain.parallel import live, mesh
from nbtrain.parallel.adoption import describe
from nbtrain.parallel.mesh import build_mesh, data_mesh, shard_mesh

PLANS = [nt.Plan(), nt.Plan(zero=0), nt.Plan(dp_replicate=2)]


def build_all() -> list[object]:
    return [built for plan in PLANS for built in (build_mesh(plan), data_mesh(build_mesh(plan)))]


@pytest.mark.parametrize("dying", [0, 3])
def test_a_newcomer_has_the_meshes_of_the_others(dying: int) -> None:
    def survive(life: Life) -> list[str]:
        build_all()
        dist.barrier()
        if life.rank == dying:
            die()
        life.rejoin(1, (dying,))
        return check()

    def begin(life: Life) -> list[str]:
        life.rejoin(1, (dying,))
        return check()

    def check() -> list[str]:
        before = c10d._world.group_count
        built = build_all()
        assert c10d._world.group_count == before
        for one in built:
            for axis in range(one.ndim):
                group = one.get_group(axis)
                row = torch.tensor([dist.get_rank()])
                dist.all_reduce(row, group=group)
                assert row.item() == sum(dist.get_process_group_ranks(group))
        whole = torch.arange(8.0)
        sharded = distribute_tensor(whole, shard_mesh(build_mesh(PLANS[2])), [Replicate(), Shard(0)])
        assert torch.equal(sharded.full_tensor(), whole)
        return [str(describe(build_mesh(plan))) for plan in PLANS]

    results = run_lives(survive, begin, 4, (dying,))
    alive = [result for result in results if result is not None]
    assert len(alive) == 4
    assert all(result == alive[0] for result in alive)


def test_flattened_axes_beside_others_are_adopted() -> None:
    def on_rank() -> None:
        from torch.distributed.device_mesh import init_device_mesh

        from nbtrain.parallel.adoption import adopted

        whole = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        twin = adopted(describe(whole, ("dp_replicate", "dp_shard")))
        before = c10d._world.group_count
        flats = [one["dp_replicate", "dp_shard"]._flatten("dp") for one in (whole, twin)]
        assert c10d._world.group_count == before
        assert twin == whole
        assert flats[0] == flats[1]
        assert flats[0].get_group() is flats[1].get_group()
        assert dist.get_process_group_ranks(flats[1].get_group()) == [dist.get_rank() % 2 + 2 * i for i in range(4)]

    run_ranks(on_rank, 8)


def test_a_mesh_that_one_rank_did_not_finish_is_made_again_on_all() -> None:
    def survive(life: Life) -> bool:
        first = build_mesh(nt.Plan(dp_replicate=2))
        if life.rank == 1:
            mesh._meshes.clear()  # as if it had been cut off on its last line
        dist.barrier()
        life.rejoin(1, ())
        again = build_mesh(nt.Plan(dp_replicate=2))
        dist.barrier(data_mesh(again).get_group())
        return again is first

    assert run_lives(survive, survive, 2, ()) == [False, False]


def test_meshes_on_groups_of_a_cell_are_forgotten_with_them() -> None:
    def survive(life: Life) -> list[bool]:
        home = build_mesh(nt.Plan())
        dist.barrier()
        dist.destroy_process_group()
        life.join(1)  # a cell forms its own
        foreign = build_mesh(nt.Plan())
        assert foreign is not home
        assert build_mesh(nt.Plan()) is foreign
        life._formed = life._formed[: len(life._formed) // 2]
        dist.barrier()
        life.rejoin(2, ())
        return [build_mesh(nt.Plan()) is home, build_mesh(nt.Plan()) is foreign]

    assert run_lives(survive, survive, 2, ()) == [[True, False], [True, False]]


def test_a_rank_that_was_cut_off_counts_on_from_the_others() -> None:
    class Steps:
        def __init__(self) -> None:
            live.track_steps(self)
            self.heard: list[object] = []

        def standing(self) -> int:
            return dist.get_rank()

        def agree(self, standings: list[int]) -> None:
            self.heard.append(standings)

    def survive(life: Life) -> list[object]:
        kept = [Steps() for _ in range(2 if life.rank == 0 else 1)]
        life.rejoin(1, ())
        later = Steps()
        life.rejoin(2, ())
        assert kept
        return later.heard

    assert run_lives(survive, survive, 2, ()) == [[[0, 1]], [[0, 1]]]
