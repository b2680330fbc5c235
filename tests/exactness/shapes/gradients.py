"""Shapes that differ in which parameters get a gradient, and when."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import Case
from tests.exactness.shapes.blocks import INNER, WIDTH, Block, Net, float_batch, freeze, squared_error, token_batch


class InputWithoutGrad(Net):
    """The first block gets the batch itself, so nothing before it is in the graph."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        del self.embedding
        del self.head
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return squared_error(self.head(self.norm(self.body(x))), target)


class FrozenMiddle(Net):
    """Gradients pass through two frozen blocks to a trainable one."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=4)
        freeze(self.blocks[1:3])


class FrozenStart(Net):
    """The embedding and the first block are frozen: backward never reaches them."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        freeze([self.embedding, self.blocks[0]])


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, num_in: int, num_out: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out)
        freeze([self.base])
        self.lora_a = nn.Parameter(torch.randn(rank, num_in) / num_in)
        self.lora_b = nn.Parameter(torch.randn(num_out, rank) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class LoraBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = LoraLinear(WIDTH, INNER)
        self.down = LoraLinear(INNER, WIDTH)
        freeze([self.norm])


class Lora(Net):
    """All is frozen but the low-rank additions; the embedding's output is made to need a gradient, as PEFT does it."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=LoraBlock)
        freeze([self.embedding, self.norm, self.head])

    def body(self, x: Tensor) -> Tensor:
        return super().body(x.requires_grad_(torch.is_grad_enabled()))


class LoraWithoutInputGrad(Lora):
    """The same without that help: the first block's frozen half gets an input that needs no gradient."""

    def body(self, x: Tensor) -> Tensor:
        return Net.body(self, x)


class BlockWithUnusedPart(Block):
    def __init__(self) -> None:
        super().__init__()
        self.never_called = nn.Linear(WIDTH, 3)


class UnusedParameter(Net):
    """Parameters that no forward ever touches, inside the blocks and at the top."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=BlockWithUnusedPart)
        self.never_read = nn.Parameter(torch.ones(7))


class DeadBranch(Net):
    """A block runs with grad enabled, but the loss does not depend on what it returns."""

    def body(self, x: Tensor) -> Tensor:
        x = self.through(self.blocks[0], x)
        self.through(self.blocks[1], x)
        return self.through(self.blocks[2], x)


class DetachedMiddle(Net):
    """Backward stops between two blocks: what lies before them is used and gets no gradient."""

    def body(self, x: Tensor) -> Tensor:
        x = self.through(self.blocks[1], self.through(self.blocks[0], x)).detach()
        return self.through(self.blocks[2], x)


class LateParameter(Net):
    """The last block owns a parameter that the start of the forward uses: its gradient comes last of all."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.blocks[2].stem_scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * self.blocks[2].stem_scale)


class GradientPenalty(Net):
    """The forward differentiates through the blocks itself, and the loss depends on the result."""

    def body(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().body(x)
        y = super().body(x)
        (slope,) = torch.autograd.grad(y.float().square().mean(), x, create_graph=True)
        return y + slope


class AlternatingLoss(Net):
    """Early exit: odd micro-batches take their loss before the last block, which gets no gradient in them."""

    def body(self, x: Tensor) -> Tensor:
        self.num_calls = getattr(self, "num_calls", 0) + int(self.training)
        depth = len(self.blocks) - self.num_calls % 2
        for block in self.blocks[:depth]:
            x = self.through(block, x)
        return x


CASES = (
    Case("plain", Net, token_batch),
    Case("input_without_grad", InputWithoutGrad, float_batch),
    Case("frozen_middle", FrozenMiddle, token_batch),
    Case("frozen_start", FrozenStart, token_batch),
    Case("lora", Lora, token_batch),
    Case("lora_without_input_grad", LoraWithoutInputGrad, token_batch),
    Case("unused_parameter", UnusedParameter, token_batch),
    Case("dead_branch", DeadBranch, token_batch),
    Case("detached_middle", DetachedMiddle, token_batch),
    Case("late_parameter", LateParameter, token_batch),
    # Reentrant checkpointing refuses torch.autograd.grad, and a recompute inside of it is not this shape's point.
    Case("gradient_penalty", lambda checkpointing: GradientPenalty("none"), token_batch, has_checkpointing=False),
    Case("alternating_loss", AlternatingLoss, token_batch),
)
