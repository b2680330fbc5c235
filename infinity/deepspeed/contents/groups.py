"""DeepSpeed's module ``utils.groups``: process groups of the mesh of the last `initialize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.distributed.collectives import Ranks
from infinity.distributed.meshes import Mesh, current_mesh
from infinity.distributed.process_groups import world_group

_Answers = tuple[Callable[[], int], Callable[[], int], Callable[[], Any]]


def _answers(ranks_of: Callable[[Mesh], Ranks], number_of: Callable[[Mesh], int]) -> _Answers:
    """Return DeepSpeed's three functions for one dimension of the mesh: its size, this process's number in it, and its group."""

    def size() -> int:
        """Number of processes in this dimension."""
        return ranks_of(current_mesh()).num

    def rank() -> int:
        """This process's number in this dimension."""
        return number_of(current_mesh())

    def group() -> Any:
        """The process group of this dimension, made if it is missing; all processes if the model is not divided."""
        mesh = current_mesh()
        ranks = ranks_of(mesh)
        return ranks.torch_group if ranks.num > 1 or mesh.is_divided else world_group()

    return size, rank, group


def _size() -> int:
    """Return 1: sequences are not divided."""
    return 1


def _rank() -> int:
    """Return 0: sequences are not divided."""
    return 0


_ANSWERS: dict[str, _Answers] = {
    "data_parallel": _answers(lambda mesh: mesh.data, lambda mesh: mesh.data.index),
    "model_parallel": _answers(lambda mesh: mesh.parts, lambda mesh: mesh.part),
    "tensor_model_parallel": _answers(lambda mesh: mesh.tensor, lambda mesh: mesh.place.tensor),
    "sequence_parallel": (_size, _rank, world_group),
}
_ANSWERS["sequence_data_parallel"] = _ANSWERS["data_parallel"]
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
