"""DeepSpeed's module ``utils.groups``: who has the same part of the model, and who the others, by the last `initialize`."""

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
    """How many processes have the same part of the model as this one, each with its own data."""
    return current_mesh().data.num if num_processes() > 1 else 1


def _data_rank() -> int:
    """Which of them this is."""
    return current_mesh().data.index


def _data_group() -> Any:
    """The group of them, as ``torch.distributed`` has it; made if there is none."""
    return current_mesh().data.torch_group if num_processes() > 1 else world_group()


def _model_size() -> int:
    """How many parts the model has."""
    return current_mesh().parts.num


def _model_rank() -> int:
    """Which of them this process has."""
    return current_mesh().part


def _model_group() -> Any:
    """One process of each part, as ``torch.distributed`` has it; where there is one part, the group of all."""
    mesh = current_mesh()
    return mesh.parts.torch_group if mesh.is_divided else world_group()


def _tensor_size() -> int:
    """How many processes share the tensors of this one's stage."""
    return current_mesh().tensor.num


def _tensor_group() -> Any:
    """Them, as ``torch.distributed`` has it. Where there is one part, the group of all."""
    mesh = current_mesh()
    return mesh.tensor.torch_group if mesh.is_divided else world_group()


def _tensor_rank() -> int:
    """Which of them this is."""
    return current_mesh().place.tensor


_ANSWERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "data_parallel": (_data_size, _data_rank, _data_group),
    "model_parallel": (_model_size, _model_rank, _model_group),
    "tensor_model_parallel": (_tensor_size, _tensor_rank, _tensor_group),
    "sequence_parallel": (_size, _rank, world_group),
    "sequence_data_parallel": (_data_size, _data_rank, _data_group),
}
PUBLIC: dict[str, Any] = {
    f"{prefix}{kind}_{what}": answer
    for prefix, kinds in (("get_", [*_ANSWERS][:3]), ("_get_", _ANSWERS))
    for kind in kinds
    for what, answer in zip(("world_size", "rank", "group"), _ANSWERS[kind], strict=True)
}
"""Those with a leading underscore as well: scripts for DeepSpeed call them."""
PUBLIC |= {"get_tensor_model_parallel_src_rank": _rank, "_clone_world_group": world_group, "mpu": None}
