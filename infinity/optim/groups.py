"""The optimizer's parameter groups: as a step begins, with tiles in place of parameters, and as a checkpoint names them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from infinity.errors import ModelError
from infinity.optim.executor import hyperparameters, same_values
from infinity.optim.main_weights import with_main_weight, without_main_weight
from infinity.torch_internals.operations import with_parts

TILES = "weight_tiles"
"""The child that holds the tiles of a module's weight."""
EXPERTS = "_by_expert"
"""Suffix of a parameter's name: the child module that holds the experts of that tensor."""


class Members:
    """Which parameter is in which group. It serves all steps until a group's list of parameters changes.

    Args:
        param_groups: the optimizer's.
        known: ``id`` of each parameter of the model.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]], known: Collection[int]) -> None:
        self._lists = [list(group["params"]) for group in param_groups]  # holds them, so no other tensor gets their ids
        self._ids = _ids_of(param_groups)
        self.index_of: dict[int, int] = {}
        """``id`` of a parameter -> the index of its group."""
        self.twice: tuple[Tensor, tuple[int, int]] | None = None
        """A parameter that is in two groups or twice in one, and their indices. The optimizer would update it twice."""
        for index, params in enumerate(self._lists):
            # A parameter that is twice in one group is found as well: torch warns of it only.
            for param in params:
                if id(param) in self.index_of:
                    self.twice = self.twice or (param, (self.index_of[id(param)], index))
                self.index_of[id(param)] = index
        self.loose = [param for param in chain(*self._lists) if id(param) not in known]
        """Members that are no parameters of the model, in the order of the groups."""

    def are_of(self, param_groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the groups still hold the same parameters."""
        return self._ids == _ids_of(param_groups)


def _ids_of(param_groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in param_groups]


class Groups:
    """Hyperparameters by group, and which parameter is in which group. What happens to the optimizer later changes nothing.

    Args:
        param_groups: the optimizer's.
        members: of these groups.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]], members: Members) -> None:
        self.values = [hyperparameters(group) for group in param_groups]
        self.members = members

    def index_of(self, param: object) -> int | None:
        """The index of the parameter's group; None if it is in none."""
        return self.members.index_of.get(id(param))

    def of(self, param: object) -> dict[str, Any] | None:
        """The hyperparameters for a parameter; None if it is in no group."""
        index = self.index_of(param)
        return None if index is None else self.values[index]

    def of_each(self, params: Mapping[int, Tensor]) -> dict[int, dict[str, Any]]:
        """The hyperparameters for each parameter that is in a group, under the parameter's key."""
        index_of = self.members.index_of
        return {
            key: self.values[index] for key, param in params.items() if (index := index_of.get(id(param))) is not None
        }

    def changed_since(self, earlier: Groups) -> list[str]:
        """Names of what differs: hyperparameters, or "params" where a parameter is in another group or in none."""
        before, now = earlier.values, self.values
        keys = {key for group in [*before, *now] for key in group}
        changed = sorted(
            key
            for key in keys
            if not same_values([group.get(key) for group in before], [group.get(key) for group in now])
        )
        return [*changed, "params"] if earlier.members.index_of != self.members.index_of else changed


@dataclass(frozen=True)
class TiledParameter:
    """A parameter in whose place others stand, each of which holds some of its rows.

    Attributes:
        fqn: the parameter's name in the model.
        original: the parameter, without its values.
        tiles: in the order of rows.
        cuts: the first row of each tile, and at the end the number of rows.
        shape: of the parameter.
        new: makes a CPU tensor of a shape and dtype, where it has room.
        name: the parameter's name in its modules.
        by_expert: whether each tile has the weights of one expert, out of a tensor of all of them.
        has_own_states: whether each tile is a parameter by itself in state dicts of the optimizer: tiles that are not updated
            together have other step counts, or no states yet.
    """

    fqn: str
    original: Parameter
    tiles: tuple[Parameter, ...]
    cuts: tuple[int, ...]
    shape: tuple[int, ...]
    new: Callable[..., Tensor]
    name: str = "weight"
    by_expert: bool = False
    has_own_states: bool = False

    @property
    def child(self) -> str:
        """The name of the module that holds the tiles, among the children of the parameter's modules."""
        return f"{self.name}{EXPERTS}" if self.by_expert else TILES

    def access_error(self, what: str) -> ModelError:
        """``what`` needs the values of the parameter, of which there are only tiles."""
        if self.by_expert:
            return ModelError(
                f"{what} needs the whole of '{self.fqn}', whose experts are paged one by one: grouped_mm and indices of experts "
                "can do without",
                cure=f'Set infinity.experts to "whole"; to read or change values, take expert after expert: the parameters of '
                f"the module's child {self.child}",
                fqn=self.fqn,
            )
        return ModelError(
            f"{what} needs the whole of '{self.fqn}', which is larger than infinity.tile_above and is used tile by tile: "
            "linear and embedding can do that",
            cure="Raise infinity.tile_above; to read or change values, take the tiles, one after the other: the parameters of "
            f"the module's child {TILES}",
            fqn=self.fqn,
        )

    def split(self, value: Any) -> list[Any]:
        """The rows of each tile, if ``value`` has the parameter's shape; else ``value`` itself for each tile."""
        if isinstance(value, Tensor) and tuple(value.shape) == self.shape:
            return [value[start:stop] for start, stop in itertools.pairwise(self.cuts)]
        return [value for _ in self.tiles]

    def join(self, values: Sequence[Any]) -> Any:
        """The counterpart of `split`. Of what is no tensor with rows, the first."""
        first = values[0]
        if not isinstance(first, Tensor) or tuple(first.shape) != tuple(self.tiles[0].shape):
            return first
        # A large result may be on a drive (`new`); parts that are on a GPU are joined there.
        on_cpu = first.device.type == "cpu"
        empty = self.new if on_cpu else functools.partial(torch.empty, device=first.device)
        whole = empty(self.shape, dtype=first.dtype)
        for (start, stop), value in zip(itertools.pairwise(self.cuts), values, strict=True):
            whole[start:stop].copy_(value)
        return whole

    def split_entry(self, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A state of the parameter as states of the tiles."""
        state, main = without_main_weight(entry)
        found: list[dict[str, Any]] = [{} for _ in self.tiles]
        for name, value in state.items():
            for tile, part in zip(found, self.split(value), strict=True):
                # Step counts are tensors that optimizers advance in place: each tile gets its own.
                tile[name] = part.clone() if isinstance(part, Tensor) and not part.dim() else part
        if main is None:
            return found
        return [with_main_weight(tile, part) for tile, part in zip(found, self.split(main), strict=True)]

    def join_entries(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """States of the tiles as one of the parameter."""
        pairs = [without_main_weight(entry) for entry in entries]
        # Scalars are those of the first tile: tiles are updated together, unless `has_own_states`.
        state = {name: self.join([each[name] for each, _ in pairs]) for name in pairs[0][0]}
        mains = [main for _, main in pairs if main is not None]
        # A main weight only if all tiles have one, or a part of the joined one would be missing.
        return with_main_weight(state, self.join(mains)) if len(mains) == len(pairs) else state


class TiledGroups:
    """All parameters of a model that are tiled, for its optimizer."""

    def __init__(self) -> None:
        self.tiled: list[TiledParameter] = []
        self._by_original: dict[int, TiledParameter] = {}
        self._by_tile: dict[int, TiledParameter] = {}

    def add(self, tiled: TiledParameter) -> None:
        """One more is tiled."""
        self.tiled.append(tiled)
        self._by_original[id(tiled.original)] = tiled
        self._by_tile.update((id(tile), tiled) for tile in tiled.tiles)

    def of(self, parameter: object) -> TiledParameter | None:
        """The tiles of a parameter; None if it is not tiled."""
        return self._by_original.get(id(parameter))

    def with_tiles(self, given: Any) -> Any:
        """Parameters, (name, parameter) pairs or groups, as optimizers take them, with tiles in place of what is tiled."""
        return given if not self.tiled or given is None else with_parts(given, self.all_of)

    def without_tiles(self, parameters: Sequence[Any], *, joins_all: bool = False) -> list[Any]:
        """The counterpart for plain parameters: what is tiled stands where its first tile did.

        Tiles with states of their own stay, unless ``joins_all``.
        """
        found = []
        for parameter in parameters:
            tiled = self._by_tile.get(id(parameter))
            if tiled is None or (tiled.has_own_states and not joins_all):
                found.append(parameter)
            elif parameter is tiled.tiles[0]:
                found.append(tiled.original)
        return found

    def all_of(self, parameter: Any) -> tuple[Any, ...]:
        """A parameter's tiles; of one that is not tiled, itself."""
        tiled = self.of(parameter)
        return (parameter,) if tiled is None else tiled.tiles

    def put_tiles(self, optimizer: Optimizer) -> None:
        """An optimizer's groups and states are those of the tiles from now on."""
        for group in optimizer.param_groups:
            group["params"] = self.with_tiles(group["params"])
        for tiled in self.tiled:
            state = optimizer.state.pop(tiled.original, None)
            if state is not None:
                optimizer.state.update(zip(tiled.tiles, tiled.split_entry(state), strict=True))

    def remove_tiles(self, optimizer: Optimizer) -> None:
        """The counterpart of `put_tiles`."""
        for group in optimizer.param_groups:
            group["params"] = self.without_tiles(group["params"], joins_all=True)
        for tiled in self.tiled:
            states = [state for tile in tiled.tiles if (state := optimizer.state.pop(tile, None)) is not None]
            # Tiles that were not updated together have no common step count, so no common state.
            if len(states) == len(tiled.tiles) and not tiled.has_own_states:
                optimizer.state[tiled.original] = tiled.join_entries(states)


def in_order_of(
    mine: Sequence[Mapping[str, Any]],
    training_state: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    *,
    is_strict: bool,
) -> dict[str, Any]:
    """Groups and states of a checkpoint as the optimizer whose groups are ``mine`` would have saved them.

    What torch saves of an optimizer goes by the order of its parameters alone. A model that was made in another way may have
    another one, and so has a checkpoint that another framework wrote, which leaves frozen parameters out and has other
    hyperparameters.

    Of another framework's, hyperparameters that only one of both has stay as the optimizer has them.

    Args:
        mine: of parameters that are all in the model.
        training_state: what a checkpoint holds besides large tensors; with ``names``.
        parameters: of the model, by name.
        is_strict: whether a parameter that only one of both optimizers has is an error; otherwise it starts anew, or its states
            are left out.

    Raises:
        ValueError: parameters are in other groups.
    """
    is_ours = "random" in training_state  # another framework has saved none
    names: Mapping[Any, str] = training_state["names"]
    saved = training_state["param_groups"]
    if len(saved) != len(mine):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} groups, and this one {len(mine)}: pass model_parameters to "
            "infinity.initialize as in that run, or load_optimizer_states=False"
        )
    fqn_of = {id(parameter): fqn for fqn, parameter in parameters.items()}
    # Experts may be paged as one tensor or each by itself; states of one kind do not fit the other.
    saved_alone, alone = (any(f"{EXPERTS}." in fqn for fqn in fqns) for fqns in (names.values(), parameters))
    if saved_alone != alone:
        there, here = (
            "for each expert" if own else "for all experts of a layer together" for own in (saved_alone, alone)
        )
        raise ValueError(
            f"the checkpoint's optimizer has states {there}, and this one {here}: pass load_optimizer_states=False, or set "
            "infinity.experts as in that run"
        )
    # By name, because the saved order of parameters may be another one than this model's.
    group_of = {names[key]: index for index, group in enumerate(saved) for key in group["params"]}
    ids: dict[str, int] = {}
    groups = []
    for index, (old, own) in enumerate(zip(saved, mine, strict=True)):
        members = []
        for parameter in own["params"]:
            fqn = fqn_of[id(parameter)]
            _check(fqn, group_of.get(fqn, None if is_ours and is_strict else index), index)
            ids[fqn] = len(ids)
            members.append(ids[fqn])
        # Of another framework only hyperparameters that both have: its others would not be understood.
        values = old if is_ours else {**own, **{name: value for name, value in old.items() if name in own}}
        groups.append({**values, "params": members})
    # A saved parameter that this optimizer has in no group: with strict loading its state would be lost.
    for fqn, saved_index in group_of.items():
        if is_strict and fqn in parameters and fqn not in ids:
            _check(fqn, saved_index, None)
    states = [[ids[fqn], fqn, scalars] for _, fqn, scalars in training_state["states"] if fqn in ids]
    others = {ids[names[key]]: entry for key, entry in training_state["others"].items() if names[key] in ids}
    return {**training_state, "param_groups": groups, "states": states, "others": others}


def _check(fqn: str, saved: int | None, mine: int | None) -> None:
    if saved != mine:
        there, here = ("none" if index is None else f"group {index}" for index in (saved, mine))
        otherwise = (
            ", load_module_strict=False to begin its states anew or leave them out," if None in (saved, mine) else ","
        )
        raise ValueError(
            f"'{fqn}' is in {there} of the checkpoint's optimizer, and in {here} of this one: pass model_parameters to "
            f"infinity.initialize as in that run{otherwise} or load_optimizer_states=False"
        )
