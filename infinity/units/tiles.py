"""Weights that are used tile by tile: memory holds some rows of a layer at a time, never all of them.

[Note: what is equal] A tile is some rows of the weight: output features of a linear layer, rows of an embedding table.
Forward sums nothing that the whole layer does not sum. So outputs, an embedding's gradient and a linear weight's
gradient have the bits of the whole layer, if torch's kernels give an element the same bits in a matrix of another size.
Three things may differ in the last bits:
  * a bias's gradient: torch chooses the order of that sum by the number of features;
  * the gradient of a linear layer's input, a sum over output features: each tile's product is rounded, and autograd
    adds the products, the last tile's first;
  * the global norm, which is computed from the tiles' norms.

[Note: in place of the weight] The module has its tiles as a child (`TILES`). Its ``weight`` is the same parameter as
before, without values. ``linear`` and ``embedding`` accept it wherever they are called. Everything else that needs
values raises, also on a reference that a script has kept. State dicts have the whole weight.
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
from infinity.torch_internals.names import without_torch_function
from infinity.torch_internals.operations import METADATA, leaves, name_of
from infinity.units.parameter import placeholder


class Tile(nn.Module):
    """Some rows of a weight. It is a module, because the engine fetches and releases weights by hooks on modules."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, function: Callable[..., torch.Tensor], x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Call ``function`` with the input and these rows."""
        return function(x, self.weight, **options)


class Tiles(nn.Module):
    """All tiles of a weight. Tied modules share one instance."""

    def __init__(self, tiled: TiledParameter) -> None:
        super().__init__()
        self.tiled = tiled
        for number, tile in enumerate(tiled.tiles):
            self.add_module(str(number), Tile(tile))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``functional.linear`` with the whole weight: [..., in] -> [..., out]. See [Note: what is equal]."""
        # cuts (0, 100, 200, 250) make three tiles: [100, in], [100, in] and [50, in]. Each computes its output features
        # with its part of the bias, and the results are joined in the last dimension.
        parts = [
            tile(functional.linear, x, bias=None if bias is None else bias[start:stop])
            for (start, stop), tile in zip(itertools.pairwise(self.tiled.cuts), self.children(), strict=True)
        ]
        return torch.cat(parts, dim=-1)

    def embedding(self, x: torch.Tensor, padding_idx: int | None, *, scale_grad_by_freq: bool) -> torch.Tensor:
        """``functional.embedding`` with the whole weight: ids of any shape -> [..., dim]. See [Note: what is equal]."""
        # Worked example: 250 rows with cuts (0, 100, 200, 250), x = [120, 3, 120].
        #   tile 0: place = [1], own = [3]; tile 1: place = [0, 2], own = [20, 20]; tile 2: nothing
        #   order = argsort([1, 0, 2]) = [1, 0, 2] puts the joined rows back into the order of x
        flat = x.reshape(-1)
        if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= self.tiled.shape[0]):
            # torch's message. Without the check an id in no tile would be missing from the result, with no error.
            raise IndexError("index out of range in self")
        if padding_idx is not None and padding_idx < 0:
            padding_idx += self.tiled.shape[0]
        parts, places = [], []
        for (start, stop), tile in zip(itertools.pairwise(self.tiled.cuts), self.children(), strict=True):
            place = ((flat >= start) & (flat < stop)).nonzero().reshape(-1)
            pads = padding_idx is not None and start <= padding_idx < stop
            options = {"padding_idx": padding_idx - start} if pads and padding_idx is not None else {}
            # A tile without ids is called as well, so that its gradient is zeros and not missing, as in torch.
            own = flat.index_select(0, place) - start
            parts.append(tile(functional.embedding, own, scale_grad_by_freq=scale_grad_by_freq, **options))
            places.append(place)
        order = torch.cat(places).argsort()
        return torch.cat(parts).index_select(0, order).reshape(*x.shape, self.tiled.shape[1])


class TiledWeight(nn.Parameter):
    """The class of a weight whose values are in its tiles. See [Note: in place of the weight]."""

    tiles: Tiles

    @classmethod
    def become(cls, weight: nn.Parameter, tiles: Tiles) -> None:
        """Make ``weight`` stand for these tiles, with their present dtype and device."""
        first = tiles.tiled.tiles[0]
        shape, requires_grad = torch.Size(tiles.tiled.shape), first.requires_grad
        with without_torch_function():
            weight.requires_grad_(False)
            weight.data = placeholder(first.dtype, first.device, shape)
            weight.requires_grad_(requires_grad)
        weight.__class__ = cls
        made: Any = weight
        made.tiles = tiles

    @staticmethod
    def cease(weight: nn.Parameter) -> None:
        """Undo `become`: the weight is an ordinary parameter again, still without values."""
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
        """Run an operation on metadata only (shape, dtype, flags), as the weight has no values; any other raises."""
        weight = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TiledWeight))
        # transformers calls untyped_storage() to find tied weights by address. The storage is that of a placeholder.
        if (func in METADATA and func not in _HOOKS) or func is torch.Tensor.untyped_storage:
            # A script that freezes the weight has to freeze its tiles, which are what is trained.
            if func in _SETTING_GRAD:
                for tile in weight.tiles.tiled.tiles:
                    func(tile, *args[1:], **kwargs)
            with without_torch_function():
                return func(*args, **kwargs)
        raise weight.tiles.tiled.access_error(name_of(func))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(size={tuple(self.shape)}, dtype={self.dtype}, tiles={len(self.tiles.tiled.tiles)})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledWeight:
        # Tied modules copy one weight: through `memo` they share the copy, and its tiles.
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


# Metadata operations that are refused all the same: no gradient ever comes to the whole weight, so they would never
# run.
_HOOKS: tuple[Any, ...] = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


def _linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    # A tiled weight may also be passed as input or bias, where it would have to be whole.
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
    # max_norm writes to the weight, and a sparse gradient would name rows of the whole weight.
    if max_norm is not None or sparse:
        raise weight.tiles.tiled.access_error(name_of(functional.embedding))
    return weight.tiles.embedding(input, padding_idx, scale_grad_by_freq=scale_grad_by_freq)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ the whole model


def tiled_in(model: nn.Module) -> dict[int, tuple[TiledParameter, int]]:
    """``id`` of each tile in a model -> its tiled parameter, and its number."""
    found = [module.tiled for module in model.modules() if isinstance(module, Tiles)]
    return {id(tile): (tiled, number) for tiled in found for number, tile in enumerate(tiled.tiles)}


def untiled_name(fqn: str) -> str:
    """The FQN of the whole weight that a tile belongs to; any other FQN unchanged."""
    # "lm_head.weight_tiles.3.weight" -> "lm_head.weight"
    # "mlp.experts.down_proj_by_expert.5.weight" -> "mlp.experts.down_proj"
    head, mark, _ = fqn.rpartition(f"{TILES}.")
    if mark:
        return f"{head}weight"
    return fqn.rpartition(f"{EXPERTS}.")[0] or fqn


def parameters_with_states(model: nn.Module) -> dict[str, nn.Parameter]:
    """The entries of an optimizer's state dict, by FQN: `whole_parameters`, and tiles with states of their own."""
    tiled = tiled_in(model)
    own = {
        fqn: parameter
        for fqn, parameter in model.named_parameters()
        if id(parameter) in tiled and tiled[id(parameter)][0].has_own_states
    }
    return whole_parameters(model) | own


def whole_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """``dict(model.named_parameters())``, with `TiledParameter.original` in place of tiles."""
    tiled = tiled_in(model)
    return {
        untiled_name(fqn): tiled[id(parameter)][0].original if id(parameter) in tiled else parameter
        for fqn, parameter in model.named_parameters()
    }
