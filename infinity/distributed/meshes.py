"""How a script has laid its model out over processes: who has the same part of it, and who has the others.

[Note: parts of a model] Tensor parallelism and pipeline stages are the script's: it gives each process a part of the model,
and its own code exchanges activations. To the engine a part is a model like any other. So nearly all that concerns ranks
concerns those with the same part (`Mesh.data`): they begin with the same weights, average gradients, divide states, fetch from
each other, write one checkpoint. Between parts nothing is exchanged but
  * the norm of all gradients, from which clipping and skipped steps follow (`infinity.gradients.norms`);
  * whether checkpoints are complete, and which one all parts have.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infinity.distributed.agreement import gather_results
from infinity.distributed.collectives import Ranks
from infinity.distributed.process_groups import call_torch, num_processes
from infinity.distributed.world import subsets, world
from infinity.errors import ConfigError

_NAMES = (
    "pp pipe pipeline pipeline_parallel pipeline_model_parallel stage",
    "tp tensor tensor_parallel tensor_model_parallel mp model model_parallel",
    "dp data data_parallel ddp fsdp shard dp_shard replicate dp_replicate",
)
_KINDS = {name: kind for kind, names in enumerate(_NAMES) for name in names.split()}
"""A name of a mesh's dimension -> what it divides: 0 the stages of a pipeline, 1 tensors, 2 data."""
_SERVICE = "mesh"
_SAYING = "infinity.initialize with mpu or mesh_param"
_CURE_OF_MPU = (
    "If each process has the whole model, leave mpu out; otherwise pass mesh_param=, a DeviceMesh of all processes "
    "whose dimensions are named dp, tp and pp"
)


class ModelPart(NamedTuple):
    """Which part of the model a process has."""

    stage: int = 0
    """Pipeline stage."""
    tensor: int = 0
    """Rank among the processes that share the tensors of this stage."""


@dataclass(frozen=True)
class Mesh:
    """The process groups of one engine.

    Attributes:
        data: the processes with the same part of the model, each with its own data.
        parts: one process of each part: this one, and the one at the same place in `data` of each other part.
        tensor: the processes of ``parts`` that share the tensors of one stage with this one.
        places: the part of each of ``parts``.
        everyone: all processes if they have different parts; else this one alone.
        source: the object from which the mesh was read: ``mpu``.
        groups: global ranks of the processes of each part.
    """

    data: Ranks
    parts: Ranks = field(default_factory=Ranks)
    tensor: Ranks = field(default_factory=Ranks)
    places: tuple[ModelPart, ...] = (ModelPart(),)
    everyone: Ranks = field(default_factory=Ranks)
    source: Any = None
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def place(self) -> ModelPart:
        """This process's part."""
        return self.places[self.parts.index]

    @property
    def is_divided(self) -> bool:
        """Whether processes have different parts of the model."""
        return self.parts.num > 1

    @property
    def part(self) -> int:
        """The number of this process's part: by stages, and in each by tensor ranks."""
        return sorted(self.places).index(self.place)


def mesh_of(mpu: Any = None, mesh_param: Any = None) -> Mesh:
    """What a script has said. All processes call it at the same point.

    Args:
        mpu: as DeepSpeed takes it: an object with ``get_data_parallel_group()``, in which all processes have to be.
        mesh_param: a ``DeviceMesh`` of all processes, whose dimensions have names that say what they are; or DeepSpeed's
            tuple of the sizes of data and sequence parallelism.

    Raises:
        ConfigError: it cannot be made sense of, on all processes alike.
    """
    everyone = world()
    everyone.services.pop(_SERVICE, None)
    if (mpu is None and mesh_param is None) or num_processes() == 1:
        return Mesh(everyone)
    told = gather_results(everyone, _SAYING, lambda: _members_by_place(mpu, mesh_param, everyone))
    for rank, other in enumerate(told):
        if other != told[0]:
            raise ConfigError(
                f"{_SAYING}: by that of rank 0, the ranks {[list(members) for _, members in told[0]]} have the same parts of "
                f"the model, and by that of rank {rank}, {[list(members) for _, members in other]}. Pass the same DeviceMesh, "
                "of all processes, on all of them"
            )
    parts = {ModelPart(*place): members for place, members in told[0]}
    groups = tuple(parts.values())
    if len(parts) == 1:
        return Mesh(everyone, source=mpu, groups=groups)
    # Example, pp 2 x tp 2 x dp 2: groups (0, 1), (2, 3), (4, 5), (6, 7); rows {0, 2, 4, 6} and {1, 3, 5, 7}, of which the first
    # has the tensor ranks (0, 2) of stage 0 and (4, 6) of stage 1.
    rows = [dict(sorted(zip(row, parts, strict=True))) for row in zip(*groups, strict=True)]
    tensors = [
        tuple(number for number, place in row.items() if place.stage == stage)
        for row in rows
        for stage in dict.fromkeys(place.stage for place in parts)
    ]
    found = subsets([*groups, *map(tuple, rows), *tensors])
    data, tensor = (next(each for each in kind if everyone.number in each) for kind in (groups, tensors))
    row = next(each for each in rows if everyone.number in each)
    mesh = Mesh(found[data], found[tuple(row)], found[tensor], tuple(row.values()), everyone, mpu, groups)
    everyone.services[_SERVICE] = mesh
    return mesh


def current_mesh() -> Mesh:
    """That of the last `mesh_of`; before, all processes have the whole model."""
    found = world().services.get(_SERVICE)
    return found if isinstance(found, Mesh) else Mesh(world())


def _members_by_place(mpu: Any, mesh_param: Any, everyone: Ranks) -> list[tuple[ModelPart, tuple[int, ...]]]:
    """Each part of the model, and the processes that have it, as this process's script says."""
    if hasattr(mesh_param, "mesh_dim_names"):
        return _of_device_mesh(mesh_param, everyone)
    if mpu is not None:
        _check_mpu(mpu, everyone)
    elif tuple(mesh_param) != (everyone.num, 1):
        raise ConfigError(
            f"mesh_param is {mesh_param!r}, and {everyone.num} processes train together: sequences that are divided among "
            f"processes are not supported. Leave it out, or pass ({everyone.num}, 1) or a DeviceMesh with names of its dimensions"
        )
    return [(ModelPart(), everyone.members)]


def _check_mpu(mpu: Any, everyone: Ranks) -> None:
    find_group = getattr(mpu, "get_data_parallel_group", None)
    if not callable(find_group):
        raise ConfigError(f"mpu has no get_data_parallel_group(): it is a {type(mpu).__name__}. {_CURE_OF_MPU}")
    members = tuple(sorted(call_torch("get_process_group_ranks", find_group())))
    if members != everyone.members:  # an mpu cannot say which parts there are
        raise ConfigError(
            f"mpu says that the ranks {list(members)} have the same part of the model, of {everyone.num}: parts by mpu are not "
            f"supported. {_CURE_OF_MPU}"
        )


def _of_device_mesh(mesh: Any, everyone: Ranks) -> list[tuple[ModelPart, tuple[int, ...]]]:
    names, ranks = mesh.mesh_dim_names, mesh.mesh
    if names is None and ranks.dim() > 1:
        raise ConfigError(
            f"mesh_param is a DeviceMesh of {tuple(ranks.shape)} without names. Pass mesh_dim_names, such as "
            '("dp", "tp"), to init_device_mesh'
        )
    if tuple(sorted(ranks.flatten().tolist())) != everyone.members:
        raise ConfigError(
            f"mesh_param is a DeviceMesh of the ranks {ranks.flatten().tolist()}, and {everyone.num} processes train together. "
            "Pass the DeviceMesh of all processes, not a part of it"
        )
    dims: list[list[int]] = [[], [], []]  # of stages, tensor ranks and data
    for dim, name in enumerate(names or ("dp",)):
        kind = _KINDS.get(name.lower())
        if kind is None and ranks.shape[dim] > 1:
            raise ConfigError(
                f"mesh_param is a DeviceMesh with a dimension '{name}', which is not a known name. Name data "
                'dimensions dp, tensor-parallel ones tp, and pipeline ones pp; others ("cp", "ep") are not supported'
            )
        dims[-1 if kind is None else kind].append(dim)
    sizes = [math.prod(ranks.shape[dim] for dim in each) for each in dims]
    by_kind = ranks.permute(*itertools.chain(*dims)).reshape(sizes)
    return [
        (ModelPart(stage, tensor), tuple(sorted(members)))
        for stage, of_tensors in enumerate(by_kind.tolist())
        for tensor, members in enumerate(of_tensors)
    ]
