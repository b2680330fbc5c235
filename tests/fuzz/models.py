"""Random small models: what a draw decides is told by their ``repr``."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class PlannedFailure(Exception):
    """Raised by a model whose batch says so, in the place of a fault in the user's own forward."""


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Twice(nn.Module):
    """Calls the same layer twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.linear(x)))


class Scaled(nn.Module):
    """Has bare parameters, one of them a scalar, and a buffer that forward changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * self.scale * self.gain


class Idle(nn.Module):
    """Has a layer that is never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.idle = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Dropped(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


_KINDS = {kind.__name__: kind for kind in (Perceptron, Normed, Twice, Scaled, Idle, Dropped)}


class RandomModel(nn.Module):
    """Embedding, residual blocks, head; gives the loss.

    Args:
        draw: decides width, blocks, ties, checkpointing and what is frozen.
        is_simple: nothing that the vertical schedule adds up in another order, or draws at another time.
    """

    def __init__(self, draw: random.Random, *, is_simple: bool = False) -> None:
        super().__init__()
        self.width = draw.choice([8, 12, 16])
        self.num_tokens = draw.choice([7, 24])
        kinds = [kind for kind in _KINDS if not (is_simple and kind in ("Twice", "Dropped", "Scaled"))]
        if draw.random() < 0.6:  # as models are: the same block many times
            kinds = [draw.choice(kinds)]
        self.embedding = nn.Embedding(self.num_tokens, self.width)
        names = [draw.choice(kinds) for _ in range(draw.randint(1, 4))]
        self.blocks = nn.ModuleList(_KINDS[name](self.width) for name in names)
        self.head = nn.Linear(self.width, self.num_tokens, bias=draw.random() < 0.5)
        self.is_tied = not is_simple and draw.random() < 0.25
        if self.is_tied:
            self.head.weight = self.embedding.weight
        self.borrows = not is_simple and draw.random() < 0.15
        self.checkpointing = draw.choice(["none", "none", "none", "reentrant", "non_reentrant"])
        self.frozen: list[str] = []
        if draw.random() < 0.25:
            names_of_blocks = [name for name, _ in self.blocks.named_parameters()]
            self.frozen = draw.sample(names_of_blocks, k=draw.randint(1, len(names_of_blocks)))
            for name in self.frozen:
                self.blocks.get_parameter(name).requires_grad_(False)
        self._told = f"{names} x {self.width}, {self.num_tokens} tokens, tied={self.is_tied}, borrows={self.borrows}, "
        self._told += f"checkpointing={self.checkpointing}, frozen={self.frozen}"

    def __repr__(self) -> str:
        return self._told

    def forward(self, tokens: Tensor, labels: Tensor, skipped: int = -1, fails: str = "") -> Tensor:
        """
        Args:
            tokens, labels: (batch, length), int64.
            skipped: index of a block that is left out.
            fails: "forward", "backward" or "interrupt": where to raise, the last one a KeyboardInterrupt in backward.
        """
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if index == skipped:
                continue
            if self.checkpointing == "none" or not torch.is_grad_enabled():
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            if fails == "forward" and index == len(self.blocks) // 2:
                raise PlannedFailure
        if fails in ("backward", "interrupt"):
            x.register_hook(_fail if fails == "backward" else _interrupt)
        if self.borrows:
            x = x + F.linear(x, self.embedding.weight[: self.width, : self.width].tanh())[..., :1]
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())

    def batch(self, draw: random.Random, **more: Any) -> dict[str, Any]:
        """Keyword arguments of a forward."""
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        shape = draw.choice([(1, 3), (2, 5)])
        tokens = torch.randint(self.num_tokens, shape, generator=generator)
        labels = torch.randint(self.num_tokens, shape, generator=generator)
        skipped = draw.randrange(len(self.blocks)) if len(self.blocks) > 1 and draw.random() < 0.1 else -1
        return {"tokens": tokens, "labels": labels, "skipped": skipped, **more}


def _fail(gradient: Tensor) -> None:
    raise PlannedFailure


def _interrupt(gradient: Tensor) -> None:
    raise KeyboardInterrupt
