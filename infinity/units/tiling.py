"""Puts tiles in place of large weights, and undoes that. See [Note: in place of the weight] in
``infinity.units.tiles``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.device.drive_tensors import DriveTensors, drives_of
from infinity.optim.groups import TiledGroups, TiledParameter
from infinity.units.experts import ExpertTiles, ExpertWeight, route
from infinity.units.tiles import TiledWeight, Tiles

# Tiles begin at multiples of 64 elements, so that an element-wise kernel's vector loop has the same iterations on a
# tile as on the whole weight, and the same bits. See [Note: why 64 elements] in `infinity.units.layout`.
_ELEMENTS = 64


class Tiling:
    """All tiled weights of a model."""

    def __init__(self, model: nn.Module, above_bytes: int | None, item_bytes: int, directories: Sequence[Path]) -> None:
        """Put tiles in place of each weight of a linear layer or embedding that is larger than ``above_bytes``.

        These weights are not tiled: weights that other modules use as well, parametrized ones, those with hooks of
        their own, and those of embeddings that are sparse or have a ``max_norm``.

        Args:
            model: its parameters are ordinary ones.
            above_bytes: the largest weight that stays whole, and the size of tiles; None: nothing is tiled.
            item_bytes: bytes of an element of the compute dtype.
            directories: on drives, for whole tensors that are joined from tiles later; none: in memory.
        """
        self._replaced: list[tuple[nn.Module, TiledParameter, tuple[str, ...]]] = []
        """Module, its tiled parameter, and the names of all its parameters before, in order."""
        self._handles: list[Any] = []
        self._new = functools.partial(_new, tuple(directories))
        self.groups = TiledGroups()
        owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
        for prefix, module in model.named_modules() if above_bytes is not None else ():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.numel() * item_bytes > (above_bytes or 0):
                    owners.setdefault(parameter, []).append((prefix, module, name))
        # MultiheadAttention passes `out_proj.weight` to one fused function, and never calls out_proj itself.
        inside = {
            id(child)
            for module in model.modules()
            if isinstance(module, nn.MultiheadAttention)
            for child in module.children()
        }
        for parameter, places in owners.items():
            if _can_be_tiled(parameter, places) and not any(id(module) in inside for _, module, _ in places):
                cuts = _row_cuts(parameter, (above_bytes or 0) // item_bytes)
                modules = [module for _, module, _ in places]
                fqn = f"{places[0][0]}.weight".removeprefix(".")
                self._put(Tiles(_cut(fqn, parameter, cuts, self._new, "weight")), modules)

    def cut_experts(self, found: Sequence[tuple[str, nn.Module, Sequence[str]]], *, touched_only: bool) -> None:
        """Put a tile for each expert in place of tensors of all experts (see ``infinity.units.experts``).

        Args:
            found: what `fused_experts` yields.
            touched_only: see `ExpertTiles`.
        """
        for prefix, module, names in found:
            # Before the first parameter is taken out, so that state dicts can list all of them in their old order.
            order = tuple(module._parameters)
            made = []
            for name in names:
                parameter: Any = module._parameters[name]
                fqn, cuts = f"{prefix}.{name}".removeprefix("."), tuple(range(len(parameter) + 1))
                tiled = _cut(fqn, parameter, cuts, self._new, name)
                has_own_states = touched_only and parameter.requires_grad
                tiled = dataclasses.replace(tiled, by_expert=True, has_own_states=has_own_states)
                made.append(ExpertTiles(tiled, touched_only=touched_only))
                self._put(made[-1], [module], order)
            self._handles += route(module, made)

    def _put(self, tiles: Tiles, modules: Sequence[nn.Module], order: tuple[str, ...] = ()) -> None:
        """Put ``tiles`` in place of a parameter of ``modules``; ``order``: the names of their parameters before."""
        tiled = tiles.tiled
        self.groups.add(tiled)
        for module in modules:
            names = order or tuple(module._parameters)
            del module._parameters[tiled.name]
            module.add_module(tiled.child, tiles)
            join = functools.partial(_join_state_dict, tiled.child, names)
            self._handles.append(module.register_state_dict_post_hook(join))
            split = functools.partial(_split_state_dict, tiled.child)
            self._handles.append(module.register_load_state_dict_pre_hook(split))
            self._replaced.append((module, tiled, names))

    def show(self) -> None:
        """Give modules the weight without values as their attribute."""
        # Apart from __init__, because tiles have their final dtype and device only when the engine has taken them. The
        # attribute goes into __dict__, so `named_parameters` lists the tiles and not the weight.
        for module, tiled, _ in self._replaced:
            tiles = _tiles_of(module, tiled.child)
            kind = ExpertWeight if isinstance(tiles, ExpertTiles) else TiledWeight
            kind.become(tiled.original, tiles)
            module.__dict__[tiled.name] = tiled.original

    def undo(self) -> None:
        """Give modules their whole weights back. No engine may hold the tiles any more."""
        for tiled in self.groups.tiled if self._replaced else ():
            TiledWeight.cease(tiled.original)
            values = [tile.detach() for tile in tiled.tiles]
            drives = drives_of(values[0])
            new = torch.empty if drives is None else drives.empty
            gradients = [tile.grad for tile in tiled.tiles if tile.grad is not None]
            with torch.no_grad():
                tiled.original.data = dataclasses.replace(tiled, new=new).join(values)
                # Only if all tiles have one: a gradient of some rows is no gradient of the weight.
                if len(gradients) == len(values):
                    tiled.original.grad = torch.cat(gradients)
        for handle in self._handles:
            handle.remove()
        for module, tiled, names in self._replaced:
            module.__dict__.pop(tiled.name, None)
            del module._modules[tiled.child]
            # The order of parameters decides the order of state dicts and of `parameters()`: it becomes that of before.
            there = {**module._parameters, tiled.name: tiled.original}
            module._parameters.clear()
            module._parameters.update({name: there.pop(name) for name in names if name in there} | there)
        self._replaced.clear()


def _new(directories: Sequence[Path], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if directories:
        return DriveTensors(directories).empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def _can_be_tiled(parameter: nn.Parameter, places: Sequence[tuple[str, nn.Module, str]]) -> bool:
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if type(parameter) is not nn.Parameter or parameter.dim() != 2 or not parameter.is_contiguous() or hooks:
        return False
    for _, module, name in places:
        is_embedding = isinstance(module, nn.Embedding) and module.max_norm is None and not module.sparse
        if name != "weight" or not (is_embedding or isinstance(module, nn.Linear)):
            return False
    return True


def _row_cuts(parameter: nn.Parameter, tile_numel: int) -> tuple[int, ...]:
    """Rows at which tiles of about the same size begin, and the number of rows."""
    # Worked example: [250, 48], tile_numel 5000. granule = 64 // gcd(64, 48) = 4: after 4 rows, 192 elements are a
    # multiple of 64. most = 5000 // 48 = 104 rows, a multiple of 4. 250 rows need 3 tiles of at most 104; equal ones
    # have 84. Cuts: 0, 84, 168, 250.
    num_rows, width = parameter.shape
    granule = _ELEMENTS // math.gcd(_ELEMENTS, width)
    most = max(tile_numel // width // granule * granule, granule)
    rows = -(-num_rows // -(-num_rows // most))  # the fewest tiles, of about equal size
    rows = -(-rows // granule) * granule
    return (*range(0, num_rows, rows), num_rows)


def _cut(
    fqn: str, parameter: nn.Parameter, cuts: tuple[int, ...], new: Callable[..., torch.Tensor], name: str
) -> TiledParameter:
    shape = tuple(parameter.shape)
    data, gradient = parameter.detach(), parameter.grad
    tiles = []
    for start, stop in itertools.pairwise(cuts):
        rows_of_it = data[start:stop].data  # `.data`: a view with a version counter of its own
        tile = nn.Parameter(rows_of_it, requires_grad=parameter.requires_grad)
        vars(tile).update(vars(parameter))  # attributes that a script has set
        tile.grad = None if gradient is None else gradient[start:stop]
        tiles.append(tile)
    parameter.grad = None
    # Tiles are views of the weight's memory. Without this, that memory would stay until the last tile has left it.
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return TiledParameter(fqn, parameter, tuple(tiles), cuts, shape, new, name)


def _tiles_of(module: nn.Module, child: str) -> Tiles:
    tiles: Any = module._modules[child]
    found: Tiles = tiles
    return found


_joined: weakref.WeakKeyDictionary[Tiles, tuple[Callable[[], Any], Callable[[], Any]]] = weakref.WeakKeyDictionary()
"""Tiles -> weak references to the state dict for which they were joined last, and to the whole tensor."""


def _join_state_dict(
    child: str, order: Sequence[str], module: nn.Module, state_dict: Any, prefix: str, *_: Any
) -> None:
    # A post hook of the module: its own entries and those of the tiles are in `state_dict`. The tiles' are replaced by
    # one entry with the weight's name, and the module's entries are put into their old order.
    tiles = _tiles_of(module, child)
    names = [f"{prefix}{child}.{number}.weight" for number in range(len(tiles.tiled.tiles))]
    if names[0] not in state_dict:
        return
    values = [state_dict.pop(name) for name in names]
    of, known = _joined.get(tiles, (lambda: None, lambda: None))
    whole: Any = known() if of() is state_dict else None  # tied: the same memory under each name
    if whole is None:
        is_live = isinstance(values[0], nn.Parameter)  # keep_vars=True
        whole = getattr(module, tiles.tiled.name) if is_live else tiles.tiled.join(values)
        _joined[tiles] = weakref.ref(state_dict), weakref.ref(whole)
    # Dicts keep the order of insertion, so all entries of the module are taken out and inserted anew.
    others = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    others[f"{prefix}{tiles.tiled.name}"] = whole
    state_dict.update({name: others.pop(name) for each in order if (name := f"{prefix}{each}") in others})
    state_dict.update(others)


def _split_state_dict(child: str, module: nn.Module, state_dict: Any, prefix: str, *others: Any) -> None:
    # The reverse, before torch loads: the entry of the whole weight becomes one entry per tile. The last of the other
    # arguments is torch's list of errors.
    tiled = _tiles_of(module, child).tiled
    whole = f"{prefix}{tiled.name}"
    value = state_dict.pop(whole, None)
    if value is None:
        return
    if tuple(value.shape) != tiled.shape:
        others[-1].append(f"size mismatch for {whole}: {tuple(value.shape)} is given, and {tiled.shape} is needed.")
        value = None
    # After an error the tiles load themselves. Otherwise torch would report each tile as missing, under names that
    # nobody knows.
    for number, part in enumerate(tiled.split(value) if value is not None else tiled.tiles):
        state_dict[f"{prefix}{child}.{number}.weight"] = part
