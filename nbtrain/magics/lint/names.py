"""The names by which a cell calls collectives, asks for its rank, and asks a person."""

from __future__ import annotations

import re

# A collective of torch.distributed: the position of its `group` argument.
GROUP_POSITION = {
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_reduce": 2,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "monitored_barrier": 0,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
}
_TORCH = "torch.distributed"
COLLECTIVES = {
    **{f"{_TORCH}.{name}": at for name, at in GROUP_POSITION.items()},
    **{f"{_TORCH}.distributed_c10d.{name}": at for name, at in GROUP_POSITION.items()},
    **{f"{_TORCH}.nn.functional.{name}": 99 for name in GROUP_POSITION},
    **{f"{_TORCH}.nn.{name}": 99 for name in GROUP_POSITION},
}
# What needs every rank of its mesh or group, and where that is given: positionally, or by one of `GROUP_WORDS`.
MAKERS = {
    f"{_TORCH}.new_group": 99,
    f"{_TORCH}.init_device_mesh": 99,
    f"{_TORCH}.device_mesh.init_device_mesh": 99,
    f"{_TORCH}.fsdp.fully_shard": 99,
    f"{_TORCH}.fsdp.FullyShardedDataParallel": 1,
    f"{_TORCH}._composable.fsdp.fully_shard": 99,
    f"{_TORCH}.tensor.distribute_tensor": 1,
    f"{_TORCH}.tensor.distribute_module": 1,
    f"{_TORCH}.tensor.parallel.parallelize_module": 1,
    f"{_TORCH}.checkpoint.save": 99,
    f"{_TORCH}.checkpoint.async_save": 99,
    f"{_TORCH}.checkpoint.load": 99,
    "torch.nn.parallel.DistributedDataParallel": 99,
    "torch.nn.parallel.distributed.DistributedDataParallel": 99,
    "nbtrain.parallelize": 99,
    "nbtrain.Trainer": 99,
    "nbtrain.verify": 99,
}
GROUP_WORDS = ("group", "process_group", "mesh", "device_mesh", "no_dist", "use_local_synchronization")
WORLD = ("None", "mesh", "device_mesh", "False")  # and what ends in group.WORLD: not a group of some ranks
TRAINER = "nbtrain.Trainer"
TRAINER_METHODS = {
    "step", "evaluate", "save", "load", "export_weights", "import_weights", "replan", "timeline", "state_dict",
}  # fmt: skip
TRAINER_NAME = re.compile(r"(.*_)?trainer$")
METHODS = {"full_tensor", "redistribute", "wait_for_everyone", "gather_for_metrics"}  # of whatever object

MODULES = {"torch": "torch", "dist": _TORCH, "nt": "nbtrain"}  # bound on every rank
RANKS = {"rank", "local_rank", "global_rank", "ddp_rank", "ddp_local_rank", "process_index", "local_process_index"}
RANK_CALLS = {"get_rank", "get_local_rank", "get_node_local_rank"}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID"}
MAINS = {
    "is_main",
    "is_main_process",
    "is_local_main_process",
    "is_global_zero",
    "is_master",
    "is_rank_zero",
    "is_world_process_zero",
    "master_process",
}
WORLD_SIZES = {"world_size", "ddp_world_size", "get_world_size", "num_processes"}

PROMPTS = {"input", "breakpoint", "pdb.set_trace", "ipdb.set_trace", "getpass.getpass", "IPython.embed"}
LEAVES = {"exit", "quit", "sys.exit", "os._exit", "os.abort"}
