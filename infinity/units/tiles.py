"""Weights that are used tile by tile: a layer of which memory never has to hold more than some rows.

Knows linear layers, embeddings and their weights; must not know when anything moves.

[Note: what is equal] A tile is some rows of the weight: output features of a linear layer, numbers of an embedding. Nothing
is summed in forward that the whole layer does not sum: outputs, an embedding's gradient and the gradient of a linear weight
are those of the whole layer, bit for bit as far as torch's kernels give an element the same bits in a matrix of another
size. That of a bias is the same sum, whose order torch chooses by the number of features. The gradient of a linear layer's
input is a sum over output features: here each tile's product is rounded to its dtype, and autograd adds these up, the last
tile's first. And the global norm is taken of the tiles' norms.

[Note: in place of the weight] The module has its tiles as a child (`TILES`). Its ``weight`` stays the parameter that it was,
but has no values: ``linear`` and ``embedding`` take it, whoever calls them, and all else that would need values raises, also
where a script holds on to the parameter. State dicts have the whole weight.
"""

from __future__ import annotations

import copy
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
from torch.nn import functional

from infinity.device.drive_tensors import DriveTensors, drives_of
from infinity.optim.groups import TILES, TiledGroups, TiledParameter
from infinity.torch_internals.names import as_plain
from infinity.torch_internals.operations import METADATA, leaves, name_of
from infinity.units.parameter import placeholder

_ELEMENTS = 64
"""Tiles begin at multiples of so many elements: element-wise kernels then give the bits that they give on the whole."""


class Tile(nn.Module):
    """Some rows of a weight; a module, so that they are fetched and let go by themselves."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, function: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> torch.Tensor:
        """What the function gives for an input and these rows."""
        return function(x, self.weight, **options)


class Tiles(nn.Module):
    """All tiles of a weight. Modules that are tied have the same ones."""

    def __init__(self, tiled: TiledParameter) -> None:
        super().__init__()
        self.tiled = tiled
        for number, tile in enumerate(tiled.tiles):
            self.add_module(str(number), Tile(tile))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As ``functional.linear``."""
        parts = [
            tile(functional.linear, x, bias=None if bias is None else bias[start:stop])
            for (start, stop), tile in zip(itertools.pairwise(self.tiled.borders), self.children(), strict=True)
        ]
        return torch.cat(parts, dim=-1)

    def embedding(self, x: torch.Tensor, padding_idx: int | None, *, scale_grad_by_freq: bool) -> torch.Tensor:
        """As ``functional.embedding``."""
        flat = x.reshape(-1)
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= self.tiled.shape[0]):
            raise IndexError("index out of range in self")
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self.tiled.shape[0]
        parts, places = [], []
        for (start, stop), tile in zip(itertools.pairwise(self.tiled.borders), self.children(), strict=True):
            place = ((flat >= start) & (flat < stop)).nonzero().reshape(-1)
            pads = padding_idx is not None and start <= padding_idx < stop
            options = {"padding_idx": padding_idx - start} if pads and padding_idx is not None else {}
            own = flat.index_select(0, place) - start  # none, too: then its gradient is zero
            parts.append(tile(functional.embedding, own, scale_grad_by_freq=scale_grad_by_freq, **options))
            places.append(place)
        order = torch.cat(places).argsort()
        return torch.cat(parts).index_select(0, order).reshape(*x.shape, self.tiled.shape[1])


class TiledWeight(nn.Parameter):
    """What a weight is while its tiles have its values. See [Note: in place of the weight]."""

    tiles: Tiles

    @staticmethod
    def become(weight: nn.Parameter, tiles: Tiles) -> None:
        """The weight stands for these tiles, of their dtype and device as they are now."""
        first = tiles.tiled.tiles[0]
        shape, requires_grad = torch.Size(tiles.tiled.shape), first.requires_grad
        with as_plain():
            weight.requires_grad_(False)
            weight.data = placeholder(first.dtype, first.device, shape)
            weight.requires_grad_(requires_grad)
        weight.__class__ = TiledWeight
        made: Any = weight
        made.tiles = tiles

    @staticmethod
    def cease(weight: nn.Parameter) -> None:
        """It is an ordinary parameter again, without values."""
        weight.__class__ = nn.Parameter
        weight.__dict__.pop("tiles", None)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return _linear(*args, **kwargs)
        if func is functional.embedding:
            return _embedding(*args, **kwargs)
        weight = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TiledWeight))
        if (func in METADATA and func not in _HOOKS) or func is torch.Tensor.untyped_storage:  # which nobody can read
            if func in _SETTING_GRAD:
                for tile in weight.tiles.tiled.tiles:
                    func(tile, *args[1:], **kwargs)
            with as_plain():
                return func(*args, **kwargs)
        raise weight.tiles.tiled.refusal(name_of(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TiledWeight(size={tuple(self.shape)}, dtype={self.dtype}, tiles={len(self.tiles.tiled.tiles)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledWeight:
        if id(self) not in memo:
            copied = memo[id(self)] = _stand_in(self.dtype, self.device, self.shape, self.requires_grad)
            copied.tiles = copy.deepcopy(self.tiles, memo)
        found: TiledWeight = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _stand_in, (self.dtype, self.device, self.shape, self.requires_grad), {"tiles": self.tiles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _stand_in(dtype: torch.dtype, device: torch.device, shape: torch.Size, requires_grad: bool) -> TiledWeight:
    made: Any = nn.Parameter(placeholder(dtype, device, shape), requires_grad=requires_grad)
    made.__class__ = TiledWeight
    found: TiledWeight = made
    return found


_SETTING_GRAD: tuple[Any, ...] = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


_HOOKS: tuple[Any, ...] = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
"""They would never be called."""


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    if not isinstance(weight, TiledWeight) or isinstance(input, TiledWeight):
        wrong = input if isinstance(input, TiledWeight) else bias
        raise wrong.tiles.tiled.refusal(name_of(functional.linear))
    return weight.tiles.linear(input, bias)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None or sparse:
        raise weight.tiles.tiled.refusal(name_of(functional.embedding))
    return weight.tiles.embedding(input, padding_idx, scale_grad_by_freq=scale_grad_by_freq)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ the whole model


class Tiling:
    """What of a model is tiled, and how that is undone."""

    def __init__(self, model: nn.Module, above_bytes: int | None, item_bytes: int, directories: Sequence[Path]) -> None:
        """Put tiles in place of each weight of a linear layer or embedding that is larger.

        Left whole is what others use in another way: weights of other modules as well, parametrized ones, those with
        hooks of their own, and embeddings that are sparse or limit their norms.

        Args:
            model: its parameters are ordinary ones.
            above_bytes: the largest weight that stays whole, and the size of tiles; None: all stay whole.
            item_bytes: of an element of the compute dtype.
            directories: where whole tensors are made later; none: in memory.
        """
        self._places: list[tuple[nn.Module, nn.Parameter]] = []
        self._handles: list[Any] = []
        owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
        for prefix, module in model.named_modules() if above_bytes is not None else ():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.numel() * item_bytes > (above_bytes or 0):
                    owners.setdefault(parameter, []).append((prefix, module, name))
        inside = {
            id(child)
            for module in model.modules()
            if isinstance(module, nn.MultiheadAttention)
            for child in module.children()
        }
        new = functools.partial(_new, tuple(directories))
        tiled: list[TiledParameter] = []
        for parameter, places in owners.items():
            if _can_be_tiled(parameter, places) and not any(id(module) in inside for _, module, _ in places):
                fqn = f"{places[0][0]}.weight".removeprefix(".")
                tiled.append(_cut(fqn, parameter, (above_bytes or 0) // item_bytes, new))
                tiles = Tiles(tiled[-1])
                for _, module, _ in places:
                    del module._parameters["weight"]
                    module.add_module(TILES, tiles)
                    self._handles.append(module.register_state_dict_post_hook(_join_state_dict))
                    self._handles.append(module.register_load_state_dict_pre_hook(_split_state_dict))
                    self._places.append((module, parameter))
        self.groups = TiledGroups(tiled)

    def show(self) -> None:
        """Modules have something in place of their weights from now on."""
        for module, parameter in self._places:
            TiledWeight.become(parameter, _tiles_of(module))
            module.__dict__["weight"] = parameter

    def undo(self) -> None:
        """Modules have their weights again, whole, if those are in memory: nobody holds them."""
        for tiled in self.groups.tiled if self._places else ():
            TiledWeight.cease(tiled.original)
            values = [tile.detach() for tile in tiled.tiles]
            drives = drives_of(values[0])
            new = torch.empty if drives is None else drives.empty
            gradients = [tile.grad for tile in tiled.tiles if tile.grad is not None]
            with torch.no_grad():
                tiled.original.data = dataclasses.replace(tiled, new=new).join(values)
                if len(gradients) == len(values):
                    tiled.original.grad = torch.cat(gradients)
        for handle in self._handles:
            handle.remove()
        for module, parameter in self._places:
            module.__dict__.pop("weight", None)
            del module._modules[TILES]
            others = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({"weight": parameter, **others})  # its place in the order of names
        self._places.clear()


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


def _cut(fqn: str, parameter: nn.Parameter, tile_numel: int, new: Callable[..., torch.Tensor]) -> TiledParameter:
    num_rows, width = parameter.shape
    granule = _ELEMENTS // math.gcd(_ELEMENTS, width)
    most = max(tile_numel // width // granule * granule, granule)
    rows = -(-num_rows // -(-num_rows // most))  # all about equally large
    rows = -(-rows // granule) * granule
    borders = (*range(0, num_rows, rows), num_rows)
    data, gradient = parameter.detach(), parameter.grad
    tiles = []
    for start, stop in itertools.pairwise(borders):
        rows_of_it = data[start:stop].data  # whose writes are counted by themselves
        tile = nn.Parameter(rows_of_it, requires_grad=parameter.requires_grad)
        vars(tile).update(vars(parameter))  # what a script has noted there
        tile.grad = None if gradient is None else gradient[start:stop]
        tiles.append(tile)
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)  # the tiles' memory is not its own
    return TiledParameter(fqn, parameter, tuple(tiles), borders, (num_rows, width), new)


def _tiles_of(module: nn.Module) -> Tiles:
    tiles: Any = module._modules[TILES]
    found: Tiles = tiles
    return found


def tiled_in(model: nn.Module) -> dict[int, tuple[TiledParameter, int]]:
    """``id`` of each tile of a model -> what it is a tile of, and its number."""
    found = [module.tiled for module in model.modules() if isinstance(module, Tiles)]
    return {id(tile): (tiled, number) for tiled in found for number, tile in enumerate(tiled.tiles)}


def untiled_name(fqn: str) -> str:
    """The name of a tile's weight in the model as it was; any other name as it is."""
    head, mark, _ = fqn.rpartition(f"{TILES}.")
    return f"{head}weight" if mark else fqn


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """As ``dict(model.named_parameters())`` with `TiledParameter.original` in place of tiles."""
    tiled = tiled_in(model)
    return {
        untiled_name(fqn): tiled[id(parameter)][0].original if id(parameter) in tiled else parameter
        for fqn, parameter in model.named_parameters()
    }


_joined: weakref.WeakKeyDictionary[Tiles, tuple[Callable[[], Any], Callable[[], Any]]] = weakref.WeakKeyDictionary()
"""For which state dict tiles were joined last, and what came out."""


def _join_state_dict(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    tiles = _tiles_of(module)
    names = [f"{prefix}{TILES}.{number}.weight" for number in range(len(tiles.tiled.tiles))]
    if names[0] not in state_dict:
        return
    values = [state_dict.pop(name) for name in names]
    of, known = _joined.get(tiles, (lambda: None, lambda: None))
    whole: Any = known() if of() is state_dict else None  # tied: the same memory under each name
    if whole is None:
        is_live = isinstance(values[0], nn.Parameter)  # keep_vars=True
        whole = module.weight if is_live else tiles.tiled.join(values)
        _joined[tiles] = weakref.ref(state_dict), weakref.ref(whole)
    others = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    state_dict[f"{prefix}weight"] = whole
    state_dict.update(others)


def _split_state_dict(
    module: nn.Module,
    state_dict: Any,
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    tiled = _tiles_of(module).tiled
    value = state_dict.pop(f"{prefix}weight", None)
    if value is None:
        return
    if tuple(value.shape) != tiled.shape:
        errors.append(f"size mismatch for {prefix}weight: {tuple(value.shape)} is given, and {tiled.shape} is needed.")
        value = None
    for number, part in enumerate(tiled.split(value) if value is not None else tiled.tiles):
        state_dict[f"{prefix}{TILES}.{number}.weight"] = part
