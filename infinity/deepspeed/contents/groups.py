"""DeepSpeed's module ``utils.groups``: process groups of the mesh of the last `initialize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.distributed.meshes import current_mesh
from infinity.distributed.process_groups import num_processes, world_group


def _size() -> int:
    """1: sequences are not divided."""
    return 1


def _rank() -> int:
    """0: sequences are not divided."""
    return 0


def _data_size() -> int:
    """Number of processes with the same part of the model as this one, each with its own data."""
    return current_mesh().data.num if num_processes() > 1 else 1


def _data_rank() -> int:
    """This process's number among them."""
    return current_mesh().data.index


def _data_group() -> Any:
    """Their process group; made if there is none."""
    return current_mesh().data.torch_group if num_processes() > 1 else world_group()


def _model_size() -> int:
    """Number of parts of the model."""
    return current_mesh().parts.num


def _model_rank() -> int:
    """Number of this process's part."""
    return current_mesh().part


def _model_group() -> Any:
    """The group with one process of each part. Undivided: the group of all."""
    mesh = current_mesh()
    return mesh.parts.torch_group if mesh.is_divided else world_group()


def _tensor_size() -> int:
    """Number of processes that share the tensors of this one's pipeline stage."""
    return current_mesh().tensor.num


def _tensor_group() -> Any:
    """Their process group. Undivided: the group of all."""
    mesh = current_mesh()
    return mesh.tensor.torch_group if mesh.is_divided else world_group()


def _tensor_rank() -> int:
    """This process's number among them."""
    return current_mesh().place.tensor


_ANSWERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "data_parallel": (_data_size, _data_rank, _data_group),
    "model_parallel": (_model_size, _model_rank, _model_group),
    "tensor_model_parallel": (_tensor_size, _tensor_rank, _tensor_group),
    "sequence_parallel": (_size, _rank, world_group),
    "sequence_data_parallel": (_data_size, _data_rank, _data_group),
}
# get_data_parallel_world_size, get_data_parallel_rank, ...: three functions for each of the first three kinds, and with
# a leading underscore for all five. Scripts call those as well.
PUBLIC: dict[str, Any] = {
    f"{prefix}{kind}_{what}": answer
    for prefix, kinds in (("get_", [*_ANSWERS][:3]), ("_get_", _ANSWERS))
    for kind in kinds
    for what, answer in zip(("world_size", "rank", "group"), _ANSWERS[kind], strict=True)
}
"""Name -> function, of all functions of the module."""
PUBLIC |= {"get_tensor_model_parallel_src_rank": _rank, "_clone_world_group": world_group, "mpu": None}
