"""How a script has laid its model out over processes: who has the same part of it, and who has the others.

Knows ranks, and what scripts hand over to say so; must not know models.

[Note: parts of a model] Tensor parallelism and pipeline stages are the script's: it gives each process a part of the model,
and its own code exchanges activations. To the engine a part is a model like any other. So nearly all that concerns ranks
concerns those with the same part (`Mesh.data`): they begin with the same weights, average gradients, divide states, fetch from
each other, write one checkpoint. Between parts nothing is exchanged but
  * the norm of all gradients, from which clipping and skipped steps follow (`infinity.gradients.norms`);
  * whether checkpoints are complete, and which one all parts have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infinity.distributed.agreement import together
from infinity.distributed.collectives import Ranks
from infinity.distributed.process_groups import members_of, num_processes
from infinity.distributed.world import subsets, world
from infinity.errors import ConfigError

_COPIES = frozenset({"replicate", "dp_replicate"})
_DATA = frozenset({"dp", "data", "data_parallel", "ddp", "fsdp", "shard", "dp_shard"}) | _COPIES
_TENSOR = frozenset({"tp", "tensor", "tensor_parallel", "tensor_model_parallel", "mp", "model", "model_parallel"})
_STAGE = frozenset({"pp", "pipe", "pipeline", "pipeline_parallel", "pipeline_model_parallel", "stage"})
_TENSOR_RANKS = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
_STAGES = ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank", "get_stage_id")
_SEQUENCES = ("get_sequence_parallel_world_size", "get_context_parallel_world_size")
"""What `mpu` may answer to, DeepSpeed's and Megatron's names: the first that is there counts."""
_SERVICE = "mesh"
_SAYING = "infinity.initialize with mpu or mesh_param"


class Place(NamedTuple):
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
        sharing: numbers of those that are to divide states, all such groups, where they are not all of a part.
    """

    data: Ranks
    parts: Ranks = field(default_factory=Ranks)
    tensor: Ranks = field(default_factory=Ranks)
    places: tuple[Place, ...] = (Place(),)
    everyone: Ranks = field(default_factory=Ranks)
    source: Any = None
    groups: tuple[tuple[int, ...], ...] = ()
    sharing: tuple[tuple[int, ...], ...] = ()

    @property
    def place(self) -> Place:
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
        mpu: as DeepSpeed takes it: an object with ``get_data_parallel_group()``, and what says which part this process has:
            ``get_tensor_model_parallel_rank()``, ``get_pipeline_model_parallel_rank()``, or DeepSpeed's other names for them.
        mesh_param: a ``DeviceMesh`` of all processes, whose dimensions have names that say what they are; or DeepSpeed's
            tuple of the sizes of data and sequence parallelism.

    Raises:
        ConfigError: it cannot be made sense of, on all processes alike.
    """
    everyone = world()
    everyone.services.pop(_SERVICE, None)
    if (mpu is None and mesh_param is None) or num_processes() == 1:
        return Mesh(everyone)
    find: Callable[[], _Told] = functools.partial(_of_mpu, mpu)
    if hasattr(mesh_param, "mesh_dim_names"):
        find = functools.partial(_of_device_mesh, mesh_param, everyone.number)
    elif mpu is None:
        find = functools.partial(_of_sizes, mesh_param, everyone.num)
    of_ranks = together(everyone, _SAYING, find)
    told = [_Told(data, Place(*place), sharing) for data, place, sharing in of_ranks]
    members = _checked(told, everyone.number)
    groups = tuple(sorted({each.data for each in told}))
    sharing = tuple(sorted({each.sharing for each in told}))
    if len(members) == everyone.num:
        return Mesh(everyone, source=mpu, groups=groups, sharing=sharing)
    places = [each.place for each in told]
    rows = [tuple(sorted(row)) for row in zip(*groups, strict=True)]
    stages = {(row, places[number].stage) for row in rows for number in row}
    tensors = [tuple(number for number in row if places[number].stage == stage) for row, stage in stages]
    found = subsets([*groups, *rows, *tensors])
    row, tensor = (next(each for each in kind if everyone.number in each) for kind in (rows, tensors))
    mesh = Mesh(
        found[members],
        found[row],
        found[tensor],
        tuple(places[number] for number in row),
        everyone,
        mpu,
        groups,
        sharing,
    )
    everyone.services[_SERVICE] = mesh
    return mesh


@dataclass(frozen=True)
class Division:
    """Who divides states with whom: all that have the same part of a model, or groups of them, each for itself.

    The second is hybrid sharding: what is divided each group has once, and fetches of it stay inside the group.

    Attributes:
        ranks: all that have the same part, which average gradients.
        sharers: this process's group, by shares.
        copies: those with the same share as this process, one of each group.
        places: of each of ``ranks``, its share and the number of its group.
        groups_of_copies: the number of the group of each of ``copies``.
    """

    ranks: Ranks
    sharers: Ranks
    copies: Ranks
    places: tuple[tuple[int, int], ...]
    groups_of_copies: tuple[int, ...] = (0,)

    @classmethod
    def among(cls, ranks: Ranks) -> Division:
        """All of them are one group."""
        return cls(ranks, ranks, Ranks(), tuple((index, 0) for index in range(ranks.num)))

    @property
    def first_group(self) -> list[int]:
        """Those of ``ranks`` that divide states with the first one, by shares."""
        found = {share: rank for rank, (share, group) in enumerate(self.places) if group == self.places[0][1]}
        return [found[share] for share in range(self.sharers.num)]


def division_of(mesh: Mesh, size: int | None, purpose: str = "") -> Division:
    """How states are divided. All processes call it at the same point.

    Args:
        mesh: who has which part.
        size: of each group, which goes into the number of those with the same part. None: as the mesh says; without, all.
        purpose: of the process groups, see `subsets`.
    """
    ranks = mesh.data
    parts = mesh.groups or (ranks.members,)
    if purpose:
        ranks = subsets(parts, purpose)[ranks.members]
    sharing = _sharing(mesh, size)
    groups = [group for group in sharing if group[0] in ranks.members]
    if len(groups) == 1:
        return Division.among(ranks)
    copies = [row for part in parts for row in zip(*(group for group in sharing if group[0] in part), strict=True)]
    found = subsets([*sharing, *copies], purpose)
    number = ranks.number
    own, same = (next(tuple(sorted(each)) for each in kind if number in each) for kind in (sharing, copies))
    at = {member: (share, index) for index, group in enumerate(groups) for share, member in enumerate(group)}
    places = tuple(at[member] for member in ranks.members)
    return Division(ranks, found[own], found[same], places, tuple(at[member][1] for member in same))


def holders_of(mesh: Mesh, size: int | None, among: int) -> Ranks:
    """Those that have the same weights as this process, where fewer divide weights than divide states. All processes call it.

    Args:
        mesh, size: as for `division_of`.
        among: see `infinity.units.shares.Shares`.
    """
    rows = [group[place::among] for group in _sharing(mesh, size) for place in range(among)]
    return next(ranks for members, ranks in subsets(rows).items() if members in rows and mesh.data.number in members)


def _sharing(mesh: Mesh, size: int | None) -> tuple[tuple[int, ...], ...]:
    """The numbers of those that divide states, all such groups."""
    if size is None:
        return mesh.sharing or (mesh.data.members,)
    parts = mesh.groups or (mesh.data.members,)
    return tuple(members[start : start + size] for members in parts for start in range(0, len(members), size))


def tensor_rank(mpu: Any = None) -> int:
    """This process among those that share the tensors of its stage, by a script's ``mpu``; None: by the last `mesh_of`."""
    return current_mesh().place.tensor if mpu is None else _asked(mpu, _TENSOR_RANKS)


def current_mesh() -> Mesh:
    """That of the last `mesh_of`; before, all processes have the whole model."""
    found = world().services.get(_SERVICE)
    return found if isinstance(found, Mesh) else Mesh(world())


class _Told(NamedTuple):
    """What a process's script has said of it."""

    data: tuple[int, ...]
    place: Place
    sharing: tuple[int, ...]


def _checked(told: Sequence[_Told], number: int) -> tuple[int, ...]:
    """The processes with the same part as ``number``."""
    parts: dict[tuple[int, ...], Place] = {}
    for rank, (members, place, _) in enumerate(told):
        if rank not in members or any(told[other][:2] != (members, place) for other in members):
            others = sorted({str(told[other].place) for other in members})
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
            f"({', '.join(map(str, parts.values()))}). Let mpu answer to get_tensor_model_parallel_rank() or "
            "get_pipeline_model_parallel_rank(), or pass the DeviceMesh of all processes, not a part of it"
        )
    return told[number].data


def _of_mpu(mpu: Any) -> _Told:
    if not callable(getattr(mpu, "get_data_parallel_group", None)):
        raise ConfigError(
            f"mpu has no get_data_parallel_group(): it is a {type(mpu).__name__}. Leave mpu out where each process has the "
            "whole model; for a DeviceMesh, pass mesh_param="
        )
    for name in _SEQUENCES:
        size = getattr(mpu, name, lambda: 1)()
        if size > 1:
            raise ConfigError(
                f"mpu.{name}() is {size}: sequences that are divided among processes are not supported. Set it to 1"
            )
    members = tuple(sorted(members_of(mpu.get_data_parallel_group())))
    return _Told(members, Place(_asked(mpu, _STAGES), _asked(mpu, _TENSOR_RANKS)), members)


def _asked(mpu: Any, names: Iterable[str]) -> int:
    return next((int(getattr(mpu, name)()) for name in names if callable(getattr(mpu, name, None))), 0)


def _of_sizes(sizes: Any, num: int) -> _Told:
    if tuple(sizes) != (num, 1):
        raise ConfigError(
            f"mesh_param is {sizes!r}, and {num} processes train together: sequences that are divided among processes are not "
            f"supported. Leave it out, or pass ({num}, 1) or a DeviceMesh with names of its dimensions"
        )
    return _Told(tuple(range(num)), Place(), tuple(range(num)))


def _of_device_mesh(mesh: Any, number: int) -> _Told:
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
    sharing: list[Any] = []
    place = Place()
    for name, index in at.items():
        kind = name.lower()
        sharing.append(slice(None) if kind in _DATA - _COPIES else index)
        if kind in _DATA:
            own.append(slice(None))
            continue
        if kind in _STAGE:
            place = place._replace(stage=index)
        elif kind in _TENSOR:
            place = place._replace(tensor=index)
        elif ranks.shape[len(own)] > 1:
            raise ConfigError(
                f"mesh_param is a DeviceMesh with a dimension '{name}', of which nothing is known here. Name those of the data "
                'dp, those of tensor parallelism tp, and those of pipeline stages pp; others ("cp", "ep") are not supported'
            )
        own.append(index)
    members, sharers = (tuple(sorted(ranks[tuple(each)].flatten().tolist())) for each in (own, sharing))
    return _Told(members, place, sharers)
