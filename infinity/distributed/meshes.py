"""How a script has laid its model out over processes: who has the same part of it, and who has the others.

[Note: parts of a model] Tensor parallelism and pipeline stages are the script's: it gives each process a part of the model,
and its own code exchanges activations. To the engine a part is a model like any other. So nearly all that concerns ranks
concerns those with the same part (`Mesh.data`): they begin with the same weights, average gradients, divide states, fetch from
each other, write one checkpoint. Between parts nothing is exchanged but
  * the norm of all gradients, from which clipping and skipped steps follow (`infinity.gradients.norms`);
  * whether checkpoints are complete, and which one all parts have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infinity.distributed.agreement import gather_results
from infinity.distributed.collectives import Ranks
from infinity.distributed.process_groups import call_torch, num_processes
from infinity.distributed.world import subsets, world
from infinity.errors import ConfigError

_DATA = frozenset({"dp", "data", "data_parallel", "ddp", "fsdp", "shard", "dp_shard", "replicate", "dp_replicate"})
_TENSOR = frozenset({"tp", "tensor", "tensor_parallel", "tensor_model_parallel", "mp", "model", "model_parallel"})
_STAGE = frozenset({"pp", "pipe", "pipeline", "pipeline_parallel", "pipeline_model_parallel", "stage"})
_SERVICE = "mesh"
_SAYING = "infinity.initialize with mpu or mesh_param"
_CURE_OF_MPU = (
    "If each process has the whole model, leave mpu out; otherwise pass mesh_param=, a DeviceMesh of all processes "
    "whose dimensions are named dp, tp and pp"
)


class ModelPart(NamedTuple):
    """Which part of the model a process has."""

    stage: int = 0
    """Of a pipeline."""
    tensor: int = 0
    """Among those that share the tensors of this stage."""

    def __str__(self) -> str:
        return f"stage {self.stage}, tensor rank {self.tensor}"


@dataclass(frozen=True)
class Mesh:
    """Of one engine.

    Attributes:
        data: those that have the same part of the model, each with its own data.
        parts: one process of each part: this one, and those in the same place of the other parts' `data`.
        tensor: those of ``parts`` that share the tensors of one stage with this one.
        places: of each of ``parts``.
        everyone: all processes, where they have different parts; else this one alone.
        source: what the script gave to say so: ``mpu``.
        groups: numbers of the processes of each part.
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
        """Of this process's part."""
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
    find: Callable[[], _Membership] = functools.partial(_of_mpu, mpu, everyone)
    if hasattr(mesh_param, "mesh_dim_names"):
        find = functools.partial(_of_device_mesh, mesh_param, everyone.number)
    elif mpu is None:
        find = functools.partial(_of_sizes, mesh_param, everyone.num)
    of_ranks = gather_results(everyone, _SAYING, find)
    of_ranks = [_Membership(data, ModelPart(*place)) for data, place in of_ranks]
    members = _checked(of_ranks, everyone.number)
    groups = tuple(sorted({each.data for each in of_ranks}))
    if len(members) == everyone.num:
        return Mesh(everyone, source=mpu, groups=groups)
    places = [each.place for each in of_ranks]
    rows = [tuple(sorted(row)) for row in zip(*groups, strict=True)]
    stages = {(row, places[number].stage) for row in rows for number in row}
    tensors = [tuple(number for number in row if places[number].stage == stage) for row, stage in stages]
    found = subsets([*groups, *rows, *tensors])
    row, tensor = (next(each for each in kind if everyone.number in each) for kind in (rows, tensors))
    mesh = Mesh(
        found[members], found[row], found[tensor], tuple(places[number] for number in row), everyone, mpu, groups
    )
    everyone.services[_SERVICE] = mesh
    return mesh


def current_mesh() -> Mesh:
    """That of the last `mesh_of`; before, all processes have the whole model."""
    found = world().services.get(_SERVICE)
    return found if isinstance(found, Mesh) else Mesh(world())


class _Membership(NamedTuple):
    """What a process's script has said of it."""

    data: tuple[int, ...]
    place: ModelPart


def _checked(of_ranks: Sequence[_Membership], number: int) -> tuple[int, ...]:
    """The processes with the same part as ``number``."""
    parts: dict[tuple[int, ...], ModelPart] = {}
    for rank, (members, place) in enumerate(of_ranks):
        if rank not in members or any(of_ranks[other] != (members, place) for other in members):
            others = sorted({str(of_ranks[other].place) for other in members})
            raise ConfigError(
                f"{_SAYING}: rank {rank} says that the ranks {list(members)} have the same part of the model as it has, and "
                f"those do not say so ({'; '.join(others)}). Make the same groups on all processes, of which each is in one"
            )
        parts[members] = place
    if len({len(members) for members in parts}) > 1:
        raise ConfigError(
            f"{_SAYING}: the groups of data parallelism are of different sizes: {[list(members) for members in parts]}. Give "
            "each part of the model as many processes"
        )
    if len(set(parts.values())) < len(parts):
        raise ConfigError(
            f"{_SAYING}: the groups {[list(members) for members in parts]} say that they have the same part of the model "
            f"({', '.join(map(str, parts.values()))}). Pass the DeviceMesh of all processes, not a part of it"
        )
    return of_ranks[number].data


def _of_mpu(mpu: Any, everyone: Ranks) -> _Membership:
    find_group = getattr(mpu, "get_data_parallel_group", None)
    if not callable(find_group):
        raise ConfigError(f"mpu has no get_data_parallel_group(): it is a {type(mpu).__name__}. {_CURE_OF_MPU}")
    members = tuple(sorted(call_torch("get_process_group_ranks", find_group())))
    if members != everyone.members:
        raise ConfigError(
            f"mpu says that the ranks {list(members)} have the same part of the model, of {everyone.num}: parts by mpu are not "
            f"supported. {_CURE_OF_MPU}"
        )
    return _Membership(members, ModelPart())  # the only part: an mpu cannot say that there are others


def _of_sizes(sizes: Any, num: int) -> _Membership:
    if tuple(sizes) != (num, 1):
        raise ConfigError(
            f"mesh_param is {sizes!r}, and {num} processes train together: sequences that are divided among processes are not "
            f"supported. Leave it out, or pass ({num}, 1) or a DeviceMesh with names of its dimensions"
        )
    return _Membership(tuple(range(num)), ModelPart())


def _of_device_mesh(mesh: Any, number: int) -> _Membership:
    names, ranks = mesh.mesh_dim_names, mesh.mesh
    if names is None:
        if ranks.dim() > 1:
            raise ConfigError(
                f"mesh_param is a DeviceMesh of {tuple(ranks.shape)} without names. Pass mesh_dim_names, such as "
                '("dp", "tp"), to init_device_mesh'
            )
        names = ("dp",)
    found = (ranks == number).nonzero()
    if not len(found):
        raise ConfigError(f"mesh_param is a DeviceMesh without rank {number}. Make one of all processes")
    at = dict(zip(names, found[0].tolist(), strict=True))
    own: list[Any] = []
    place = ModelPart()
    for name, index in at.items():
        kind = name.lower()
        if kind in _DATA:
            own.append(slice(None))
            continue
        if kind in _STAGE:
            place = place._replace(stage=index)
        elif kind in _TENSOR:
            place = place._replace(tensor=index)
        elif ranks.shape[len(own)] > 1:
            raise ConfigError(
                f"mesh_param is a DeviceMesh with a dimension '{name}', which is not a known name. Name data "
                'dimensions dp, tensor-parallel ones tp, and pipeline ones pp; others ("cp", "ep") are not supported'
            )
        own.append(index)
    return _Membership(tuple(sorted(ranks[tuple(own)].flatten().tolist())), place)
