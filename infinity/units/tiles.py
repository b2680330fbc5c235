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
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from infinity.optim.groups import EXPERTS, TILES, TiledParameter
from infinity.torch_internals.names import as_plain
from infinity.torch_internals.operations import METADATA, leaves, name_of
from infinity.units.parameter import placeholder


class Tile(nn.Module):
    """Some rows of a weight; a module, so that they are fetched and released by themselves."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, function: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> torch.Tensor:
        """What the function gives for an input and these rows."""
        return function(x, self.weight, **options)


class Tiles(nn.Module):
    """All tiles of a weight. Modules that are tied have the same ones."""

    @property
    def weight_class(self) -> type[TiledWeight]:
        """What stands for the weight."""
        return TiledWeight

    def __init__(self, tiled: TiledParameter) -> None:
        super().__init__()
        self.tiled = tiled
        for number, tile in enumerate(tiled.tiles):
            self.add_module(str(number), Tile(tile))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As ``functional.linear``."""
        parts = [
            tile(functional.linear, x, bias=None if bias is None else bias[start:stop])
            for (start, stop), tile in zip(itertools.pairwise(self.tiled.cuts), self.children(), strict=True)
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
        for (start, stop), tile in zip(itertools.pairwise(self.tiled.cuts), self.children(), strict=True):
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

    @classmethod
    def become(cls, weight: nn.Parameter, tiles: Tiles) -> None:
        """The weight stands for these tiles, of their dtype and device as they are now."""
        first = tiles.tiled.tiles[0]
        shape, requires_grad = torch.Size(tiles.tiled.shape), first.requires_grad
        with as_plain():
            weight.requires_grad_(False)
            weight.data = placeholder(first.dtype, first.device, shape)
            weight.requires_grad_(requires_grad)
        weight.__class__ = cls
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
        return cls.look_at(func, args, kwargs)

    @staticmethod
    def look_at(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that needs no values; any other raises."""
        weight = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TiledWeight))
        if (func in METADATA and func not in _HOOKS) or func is torch.Tensor.untyped_storage:  # which nobody can read
            if func in _SETTING_GRAD:
                for tile in weight.tiles.tiled.tiles:
                    func(tile, *args[1:], **kwargs)
            with as_plain():
                return func(*args, **kwargs)
        raise weight.tiles.tiled.access_error(name_of(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(size={tuple(self.shape)}, dtype={self.dtype}, tiles={len(self.tiles.tiled.tiles)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledWeight:
        if id(self) not in memo:
            copied = memo[id(self)] = _stand_in(type(self), self.dtype, self.device, self.shape, self.requires_grad)
            copied.tiles = copy.deepcopy(self.tiles, memo)
        found: TiledWeight = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        form = type(self), self.dtype, self.device, self.shape, self.requires_grad
        return _stand_in, form, {"tiles": self.tiles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _stand_in(
    kind: type[TiledWeight], dtype: torch.dtype, device: torch.device, shape: torch.Size, requires_grad: bool
) -> TiledWeight:
    made: Any = nn.Parameter(placeholder(dtype, device, shape), requires_grad=requires_grad)
    made.__class__ = kind
    found: TiledWeight = made
    return found


_SETTING_GRAD: tuple[Any, ...] = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


_HOOKS: tuple[Any, ...] = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
"""They would never be called."""


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    if not isinstance(weight, TiledWeight) or isinstance(input, TiledWeight):
        wrong = input if isinstance(input, TiledWeight) else bias
        raise wrong.tiles.tiled.access_error(name_of(functional.linear))
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
        raise weight.tiles.tiled.access_error(name_of(functional.embedding))
    return weight.tiles.embedding(input, padding_idx, scale_grad_by_freq=scale_grad_by_freq)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ the whole model


def tiled_in(model: nn.Module) -> dict[int, tuple[TiledParameter, int]]:
    """``id`` of each tile of a model -> what it is a tile of, and its number."""
    found = [module.tiled for module in model.modules() if isinstance(module, Tiles)]
    return {id(tile): (tiled, number) for tiled in found for number, tile in enumerate(tiled.tiles)}


def untiled_name(fqn: str) -> str:
    """The name of a tile's weight in the model as it was; any other name as it is."""
    head, mark, _ = fqn.rpartition(f"{TILES}.")
    if mark:
        return f"{head}weight"
    return fqn.rpartition(f"{EXPERTS}.")[0] or fqn


def parameters_with_states(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, of what an optimizer's state dict has entries: `whole_parameters`, and the tiles that have states of their own."""
    tiled = tiled_in(model)
    own = {
        fqn: parameter
        for fqn, parameter in model.named_parameters()
        if id(parameter) in tiled and tiled[id(parameter)][0].has_own_states
    }
    return whole_parameters(model) | own


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """As ``dict(model.named_parameters())`` with `TiledParameter.original` in place of tiles."""
    tiled = tiled_in(model)
    return {
        untiled_name(fqn): tiled[id(parameter)][0].original if id(parameter) in tiled else parameter
        for fqn, parameter in model.named_parameters()
    }
