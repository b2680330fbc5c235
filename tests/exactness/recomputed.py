"""Plain torch that computes each block once more in backward, whatever way its tensors come: the ordinary order's bits.

``torch.utils.checkpoint`` does the same for tensors that come as positional arguments, in containers of none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, box: list[Any], places: list[int], _: Tensor, *inputs: Any) -> Any:
        ctx.run, ctx.inputs, ctx.state = run, inputs, torch.get_rng_state()
        ctx.set_materialize_grads(False)
        # With gradients, though they are thrown away: some kernels give other bits without.
        with torch.enable_grad():
            leaves = _leaves(inputs)
            results = run(leaves)
        box.extend(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in results)
        ctx.places = [index for index, x in enumerate(results) if isinstance(x, Tensor) and x.requires_grad]
        places.extend(ctx.places)
        return tuple(box[index] for index in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        leaves = _leaves(ctx.inputs)
        state = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            outputs = ctx.run(leaves)
        torch.set_rng_state(state)
        pairs = [(outputs[place], g) for place, g in zip(ctx.places, gradients, strict=True) if g is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
        return None, None, None, None, *(x.grad if isinstance(x, Tensor) else None for x in leaves)


def _leaves(inputs: Any) -> list[Any]:
    return [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]


def recompute_blocks(model: nn.Module, is_block: Callable[[str, nn.Module], bool]) -> nn.Module:
    """Have the blocks of ``model`` recomputed; the model is changed in place and returned."""
    for name, module in model.named_modules():
        if is_block(name, module):
            module.forward = _recomputed(module.forward)  # type: ignore[method-assign]
    return model


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    anchor = torch.zeros((), requires_grad=True)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        inputs, form = tree_flatten((args, kwargs))
        forms: list[Any] = []

        def run(leaves: list[Any]) -> list[Any]:
            args, kwargs = tree_unflatten(leaves, form)
            outputs, out_form = tree_flatten(forward(*args, **kwargs))
            forms.append(out_form)
            return outputs

        box: list[Any] = []
        places: list[int] = []
        results = _Recomputed.apply(run, box, places, anchor, *inputs)
        for place, result in zip(places, results, strict=True):
            box[place] = result
        return tree_unflatten(box, forms[0])

    return call
