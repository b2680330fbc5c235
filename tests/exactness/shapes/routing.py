"""Shapes whose batches decide which modules run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.exactness.case import Batch, Case, Draw
from tests.exactness.shapes.blocks import LENGTH, VOCABULARY, WIDTH, Block, Net, token_batch


class SkippedBlocks(Net):
    """The batch names the blocks to run and their order; the others are not called at all."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=4)

    def forward(self, tokens: Tensor, labels: Tensor, order: tuple[int, ...]) -> Tensor:
        x = self.embedding(tokens)
        for index in order:
            x = self.through(self.blocks[index], x)
        return self.loss(x, labels)


# One row per step, one entry per micro-batch. Block 3 has no input for whole steps; the last step is unlike all others.
_ORDERS = (
    ((0, 1, 2), (0, 1, 2), (0, 1, 2)),
    ((0, 2), (2, 0), (0, 1)),
    ((0, 1, 2, 3), (0,), (3, 2, 1, 0)),
    ((3, 1), (3, 1), (1, 3)),
)


def ordered_batch(draw: Draw) -> Batch:
    return {**token_batch(draw), "order": _ORDERS[draw.step % len(_ORDERS)][draw.micro_batch]}


class Mixture(nn.Module):
    """Experts in a ModuleList; only those that some token goes to are called."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(num_experts))

    def forward(self, x: Tensor, allowed: tuple[int, ...]) -> Tensor:
        flat = x.flatten(0, -2)
        open_experts = torch.tensor(allowed, device=x.device)
        weights = torch.softmax(self.router(flat)[:, open_experts].float(), dim=-1)
        weight, choice = weights.max(dim=-1)
        chosen = open_experts[choice]
        y = flat.clone()
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if len(rows) > 0:
                out = expert(flat[rows]) * weight[rows, None].to(x.dtype)
                y = y.index_add(0, rows, out.to(y.dtype))
        return y.view_as(x)


class Experts(Net):
    """A mixture of experts in which some experts get no token for whole steps, and another one each time."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=2, make_block=Mixture)

    def forward(self, tokens: Tensor, labels: Tensor, allowed: tuple[int, ...]) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.through(block, x, allowed)
        return self.loss(x, labels)


_ALLOWED = ((0, 1), (1, 2), (0, 2), (1, 2, 3))


def routed_batch(draw: Draw) -> Batch:
    return {**token_batch(draw), "allowed": _ALLOWED[draw.step % len(_ALLOWED)]}


class VaryingLength(Net):
    """Every micro-batch has another length, and the number of calls of the one block follows it."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=2)

    def body(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[1] - LENGTH + 1):
            x = self.through(self.blocks[0], x)
        return self.through(self.blocks[1], x)


def varying_batch(draw: Draw) -> Batch:
    length = LENGTH + (draw.step + draw.micro_batch) % 3
    return {"tokens": draw.integers(VOCABULARY, 2, length), "labels": draw.integers(VOCABULARY, 2, length)}


CASES = (
    Case("skipped_blocks", SkippedBlocks, ordered_batch),
    Case("experts", Experts, routed_batch),
    Case("varying_length", VaryingLength, varying_batch),
)
