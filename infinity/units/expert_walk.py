"""Ranks that use the same experts in the same order, whatever their own tokens are routed to.

[Note: experts of ranks] In stage 3 all ranks gather the same units in the same order (see [Note: the same units on all
ranks] in ``infinity.paging.parameter_cache``), but a router chooses experts for the tokens of its own rank. So in each
call of a module of experts, ranks add up the tokens of each expert. All of them use the experts that have any:

    grouped_mm     tensor by tensor, experts with most tokens first
    batched_mm     tensor by tensor, experts by number
    eager          expert by expert, by number

A rank without tokens for an expert *visits* it: the expert is fetched and released as on the other ranks, and nothing is
computed. Example: rank 0 has tokens for experts 1 and 4, rank 1 for 4 and 6, by ``eager``:

    rank 0   gate_up1  down1  gate_up4  down4 (gate_up6) (down6)       (visits in brackets)
    rank 1  (gate_up1)(down1) gate_up4  down4  gate_up6   down6

Backward needs the same experts in the reverse order, on ranks without tokens as well. So each use, with tokens or
without, adds a node to the graph that saves the weight (`_Visit`). Autograd runs the nodes of a graph in the reverse
order of their creation. So these nodes ask for the weights in one order on all ranks. A product asks for its weight right
before or after its own node does, which fetches nothing more. The nodes form a chain, from the module's input to its
output, of numbers that are 0:

    input -> _Visit -> _Visit -> _Visit -> ... -> _Attach (with the output) -> output

A trained expert gets a gradient of zeros from a visit, as it has in torch as a part of the gradient of all experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from infinity.units.tiles import Tile


class Walk:
    """One call of a module of experts on one of several ranks. See [Note: experts of ranks]."""

    def __init__(self, routed: Sequence[int], tensors: Sequence[Sequence[Tile]], anchor: torch.Tensor) -> None:
        """
        Args:
            routed: the experts that have tokens on any rank, those with most tokens first.
            tensors: of each tensor (gate_up, down), all experts by number.
            anchor: the beginning of the chain, see `anchor_of`.
        """
        self.routed = list(routed)
        # In the order of `eager`. The others use all experts of a tensor at once, and leave none to be visited.
        self._left = dict.fromkeys(tensor[e] for e in sorted(routed) for tensor in tensors)
        self._anchor = anchor

    def use(self, tile: Tile, weight: torch.Tensor, *, has_tokens: bool, is_saved: bool = True) -> None:
        """This rank has fetched an expert, and computed with it if it has tokens.

        Args:
            tile: the expert.
            weight: its weight in memory, without the dimension of experts.
            has_tokens: whether this rank's own graph has the weight, and gives it a gradient.
            is_saved: whether backward needs the weight.
        """
        self._left.pop(tile, None)
        if torch.is_grad_enabled():
            self._anchor = visit(self._anchor, weight, has_tokens, is_saved)

    def go_to(self, tile: Tile) -> None:
        """This rank is about to use an expert: visit those that other ranks use before it."""
        while tile in self._left and (first := next(iter(self._left))) is not tile:
            self._visit(first)

    def _visit(self, tile: Tile) -> None:
        self.use(tile, tile(lambda _, weight: weight[0], None), has_tokens=False)

    def end(self, output: torch.Tensor) -> torch.Tensor:
        """Visit the experts that are left. Returns the module's output, with the chain in its graph."""
        while self._left:
            self._visit(next(iter(self._left)))
        # A copy: autograd forbids to change a view in place that comes from `attach`, as models may.
        return attach(output, self._anchor, True) if self._anchor.requires_grad else output


def anchor_of(x: torch.Tensor, *, trains: bool) -> torch.Tensor:
    """The beginning of a chain: a number that depends on the module's input ``x``, if that requires a gradient.

    ``trains``: whether any parameter of the module requires one. The chain must have a gradient wherever a product with
    a weight has one, so that backward asks for the weights on all ranks or on none.
    """
    zero = torch.zeros((), dtype=torch.float32, device=x.device)
    if torch.is_grad_enabled() and x.requires_grad:
        begun: torch.Tensor = visit(zero, x, True, False)  # gives ``x`` no gradient
        return begun
    return zero.requires_grad_(trains and torch.is_grad_enabled())


class _Visit(torch.autograd.Function):
    """Returns a zero that depends on ``anchor`` and ``weight``.

    Its backward asks for the weight if that ``is_saved``, and gives it zeros unless it ``has_tokens``, and so gets a
    gradient from them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weight: torch.Tensor, has_tokens: bool, is_saved: bool) -> torch.Tensor:
        # A weight that is not saved is neither held nor fetched in backward. Metadata needs no values.
        ctx.save_for_backward(*[weight] * is_saved)
        ctx.form = weight.shape, weight.dtype, weight.device
        ctx.has_tokens = has_tokens
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _ = ctx.saved_tensors  # looking it up fetches it
        shape, dtype, device = ctx.form
        gives_zeros = ctx.needs_input_grad[1] and not ctx.has_tokens
        zeros = torch.zeros(shape, dtype=dtype, device=device) if gives_zeros else None
        return gradients[0], zeros, None, None


class _Attach(torch.autograd.Function):
    """Returns a copy or a view of ``x``; its backward also sends a zero to ``anchor``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, copies: bool) -> torch.Tensor:
        ctx.form = anchor.dtype, anchor.device
        return x.clone() if copies else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        dtype, device = ctx.form
        return gradients[0], torch.zeros((), dtype=dtype, device=device), None


visit: Any = _Visit.apply
attach: Any = _Attach.apply
