"""DeepSpeed's ``TiledLinear``: a linear layer in tiles, each of which is fetched and let go by itself.

[Note: order of summation] Row by row of tiles: a row's result is the first tile's, to which those of the others are added
one after the other, in the order of the input; the bias is the last tile's. With ``in_splits=1`` nothing is summed that a
linear layer does not sum. The gradient of the input is added up over the rows by autograd, the last row first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.loop.gathered_parameters import GatheredParameters


def _borders(num_items: int, num_parts: int) -> list[int]:
    """Where parts begin, and where the last one ends; the first parts are larger by one if it does not come out even."""
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


class TiledLinear(nn.Module):
    """In place of ``torch.nn.Linear``, so that a layer larger than the memory for one unit can be used.

    Parameters are called as DeepSpeed's, ``linears.ROW.COLUMN.weight`` and ``linears.ROW.LAST.bias``; state dicts,
    checkpoints and exports hold the tiles by these names, and clipping takes the norm of each. Outside of blocks each
    row of tiles becomes a unit by itself; inside blocks ``infinity.units`` has to name the tiles (``"*.linears.*.*"``).

    Args:
        in_features, out_features, bias: see ``torch.nn.Linear``.
        in_splits: number of tiles along the input.
        out_splits: number of tiles along the output. The results are those of ``torch.nn.Linear`` as far as its kernels
            give an element the same bits in a matrix of another size; ``in_splits`` changes the order of summation.
        input_is_already_split: `forward` gets a sequence of ``in_splits`` tensors.
        combine_out_splits: whether `forward` gives one tensor, or a list of ``out_splits``.
        linear_cls: called for each tile with its numbers of features, ``bias=`` and ``kwargs``.
        init_linear: a linear layer to copy parameters from.
        kwargs: for ``linear_cls``.

    Raises:
        ModelError: there are more splits than features, or less than one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., Any] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for what, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ModelError(
                    f"{what}_splits={splits}: must be in 1 to {what}_features={features}. Take one of these"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts, self.out_parts = _borders(in_features, in_splits), _borders(out_features, out_splits)
        widths = _sizes(self.in_parts)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and column == in_splits - 1, **kwargs)
                for column, width in enumerate(widths)
            )
            for height in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """From ``(..., in_features)``, or its parts, to ``(..., out_features)``, or its parts."""
        if self.in_splits == 1:
            inputs: Sequence[Any] = input_ if self.input_is_already_split and not torch.is_tensor(input_) else [input_]
        elif self.input_is_already_split:
            inputs = input_
        else:
            inputs = self._split_global_input(input_, _sizes(self.in_parts))
        if len(inputs) != self.in_splits:
            raise ModelError(f"the input comes in {len(inputs)} parts, and in_splits is {self.in_splits}")
        outputs: list[Any] = []
        for out_id, row in enumerate(self._rows()):
            output = None
            for in_id, (tile, part) in enumerate(zip(row, inputs, strict=True)):
                output = self._reduce_local_output(in_id, out_id, output, tile(part))
            outputs.append(output)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _rows(self) -> list[list[Any]]:
        return [list(row.children()) for row in self.linears]

    # The next three are what subclasses of DeepSpeed's override.

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Sequence[Any]:
        """The parts of the input, along its last dimension."""
        return torch.split(input, split_sizes, dim=-1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """The sum of what a row's tiles have given so far (None before the first) and of what the next one gives."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        """One result of those of the rows."""
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: Any) -> None:
        """Take weight and bias of a linear layer of the same size; either may be paged.

        Raises:
            ModelError: its size differs, or one has a bias and the other none.
        """
        shape = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != shape:
            raise ModelError(f"the other weight has shape {tuple(other.weight.shape)}. Give a layer with {shape}")
        if (other.bias is not None) != self.use_bias:
            raise ModelError("one layer has a bias, the other none. Make both with bias=True, or with bias=False")
        for row, tiles in enumerate(self._rows()):
            rows = slice(self.out_parts[row], self.out_parts[row + 1])
            for column, tile in enumerate(tiles):
                columns = slice(self.in_parts[column], self.in_parts[column + 1])
                with GatheredParameters([other.weight, *tile.parameters()], modifier_rank=0):
                    tile.weight.copy_(other.weight[rows, columns])
                if tile.bias is not None:
                    with GatheredParameters([other.bias, tile.bias], modifier_rank=0):
                        tile.bias.copy_(other.bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """For a ``linear_cls`` that gives its result and its own bias (None for none), as Megatron-LM's do: so does this."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, bias_before = current_out if current_out is not None else (None, None)
        result, bias = new_out
        return super()._reduce_local_output(in_id, out_id, before, result), bias_before if bias is None else bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        result = super()._combine_output_splits([result for result, _ in outputs])
        return result, super()._combine_output_splits(biases) if biases else None


def _sizes(borders: list[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(borders)]
