"""A computation that is done once more in backward, in plain torch: what activation checkpointing means.

``torch.utils.checkpoint`` does the same for tensors that come as positional arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Any]], list[Any]]
"""From leaves to leaves: tensors, and what is no tensor."""


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, results: list[Any], places: list[int], _: Tensor, *inputs: Any) -> Any:
        ctx.run, ctx.inputs, ctx.state = run, inputs, torch.get_rng_state()
        ctx.set_materialize_grads(False)
        # With gradients, though they are thrown away: some kernels give other bits without.
        with torch.enable_grad():
            found = run(_leaves(inputs))
        results.extend(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in found)
        places.extend(place for place, x in enumerate(found) if isinstance(x, Tensor) and x.requires_grad)
        ctx.places = places
        return tuple(results[place] for place in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        leaves = _leaves(ctx.inputs)
        state = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            results = ctx.run(leaves)
        torch.set_rng_state(state)
        pairs = [(results[place], g) for place, g in zip(ctx.places, gradients, strict=True) if g is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        return None, None, None, None, *(x.grad if isinstance(x, Tensor) else None for x in leaves)


def _leaves(inputs: Any) -> list[Any]:
    return [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]


def recomputed(run: Run, inputs: list[Any]) -> list[Any]:
    """``run(inputs)``, of which nothing is kept but the inputs."""
    results: list[Any] = []
    places: list[int] = []
    outputs = _Recomputed.apply(run, results, places, torch.zeros((), requires_grad=True), *inputs)
    for place, output in zip(places, outputs, strict=True):
        results[place] = output
    return results
