"""DeepSpeed's module ``utils.groups``: data is all that is parallel; every group is that of all."""

from __future__ import annotations

from typing import Any

from infinity.distributed.collectives import num_processes, world, world_group

_KINDS = ("data_parallel", "model_parallel", "tensor_model_parallel", "sequence_parallel", "sequence_data_parallel")


def _size() -> int:
    """1: nothing of a model is spread over processes."""
    return 1


def _rank() -> int:
    """0: nothing of a model is spread over processes."""
    return 0


def _group() -> Any:
    """The group of all, as ``torch.distributed`` has it; made if there is none."""
    return world_group()


def _data_size() -> int:
    """How many processes train together."""
    return num_processes()


def _data_rank() -> int:
    """Which of them this is."""
    return world().index


PUBLIC: dict[str, Any] = {
    f"{prefix}{kind}_{what}": answer
    for prefix, kinds in (("get_", _KINDS[:3]), ("_get_", _KINDS))
    for kind in kinds
    for what, answer in (("world_size", _size), ("rank", _rank), ("group", _group))
}
"""Those with a leading underscore as well: scripts for DeepSpeed call them."""
for _prefix in ("get_", "_get_"):
    PUBLIC |= {f"{_prefix}data_parallel_world_size": _data_size, f"{_prefix}data_parallel_rank": _data_rank}
PUBLIC |= {"get_tensor_model_parallel_src_rank": _rank, "_clone_world_group": _group, "mpu": None}
