"""What the shapes are put together from: a residual block, a network of blocks, activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.exactness.case import Batch, Draw

# No multiples of 64, and a weight of 24 x 104 elements that is larger than the small page of the grid holds.
WIDTH = 24
INNER = 104
VOCABULARY = 48
LENGTH = 5


class Block(nn.Module):
    """A residual MLP with a normalization, the smallest thing that looks like a transformer block."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tokens in, loss out, with blocks between an embedding and a head; shapes override :meth:`body`."""

    def __init__(self, checkpointing: str, num_blocks: int = 3, make_block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def through(self, block: Callable[..., Any], *inputs: Any) -> Any:
        """Call ``block``, under activation checkpointing where that is on and makes sense.

        Reentrant checkpointing gives no gradients to a block none of whose inputs needs one, so nobody uses it there.
        """
        if self.checkpointing == "none" or not self.training or not torch.is_grad_enabled():
            return block(*inputs)
        is_reentrant = self.checkpointing == "reentrant"
        if is_reentrant and not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
            return block(*inputs)
        return checkpoint(block, *inputs, use_reentrant=is_reentrant)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, -2), labels.flatten())

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.loss(self.body(self.embedding(tokens)), labels)


def token_batch(draw: Draw) -> Batch:
    """What :class:`Net` takes."""
    return {"tokens": draw.integers(VOCABULARY, 2, LENGTH), "labels": draw.integers(VOCABULARY, 2, LENGTH)}


def float_batch(draw: Draw) -> Batch:
    """Inputs that carry no gradient, and targets of the same shape."""
    return {"x": draw.floats(2, LENGTH, WIDTH), "target": draw.floats(2, LENGTH, WIDTH)}


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """A loss in fp32 that is not small at the start."""
    return F.mse_loss(prediction.float(), target.float())


def freeze(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.requires_grad_(False)
