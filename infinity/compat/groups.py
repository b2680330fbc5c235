"""DeepSpeed's module ``utils.groups`` for one process: every rank is 0, every size 1, and every group is that of all."""

from __future__ import annotations

from typing import Any

from infinity.distributed.collectives import world_group

_KINDS = ("data_parallel", "model_parallel", "tensor_model_parallel", "sequence_parallel", "sequence_data_parallel")


def _size() -> int:
    """1: there is one process."""
    return 1


def _rank() -> int:
    """0: there is one process."""
    return 0


def _group() -> Any:
    """The group of this one process, as ``torch.distributed`` has it; made if there is none."""
    return world_group()


PUBLIC: dict[str, Any] = {
    f"{prefix}{kind}_{what}": answer
    for prefix, kinds in (("get_", _KINDS[:3]), ("_get_", _KINDS))
    for kind in kinds
    for what, answer in (("world_size", _size), ("rank", _rank), ("group", _group))
}
"""Those with a leading underscore as well: scripts for DeepSpeed call them."""
PUBLIC |= {"get_tensor_model_parallel_src_rank": _rank, "_clone_world_group": _group, "mpu": None}
