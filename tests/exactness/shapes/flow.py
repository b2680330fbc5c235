"""Shapes that differ in how modules are called and what passes between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import Batch, Case, Draw, PlannedFailure
from tests.exactness.shapes.blocks import INNER, VOCABULARY, WIDTH, Block, Net, token_batch


class CalledTwice(Net):
    """One block runs twice, once with another in between."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 2):
            x = self.through(self.blocks[index], x)
        return x


class SharedBlock(Net):
    """One block is all the depth there is, as in ALBERT."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=1)

    def body(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.through(self.blocks[0], x)
        return x


class NoGradCall(Net):
    """The blocks run without grad first, and what they say there is the target of the pass that counts."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().body(x)
        y = super().body(x)
        return y + (y - target).square()


class CrossBlock(Block):
    """A block with a second input, which all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = torch.softmax(x @ self.mix(memory).transpose(-1, -2), dim=-1)
        return super().forward(x + scores @ memory)


class SharedInput(Net):
    """An encoder's output goes into every decoder block, as cross-attention has it."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=CrossBlock)
        self.encoder = nn.ModuleList(Block() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = self.through(block, memory)
        for block in self.blocks:
            x = self.through(block, x, memory)
        return x


class DropsItself(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.5 else super().forward(x)


class StochasticDepth(Net):
    """Blocks that give back what they are given, now and then."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=DropsItself)


class CrossingSkips(Net):
    """Past the blocks goes a value that depends on parameters which are used behind the blocks as well."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.head.weight = self.embedding.weight
        self.offset = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        start = x + self.offset
        return super().body(start) + self.offset + start


class DenseSkips(Net):
    """What lies between blocks is added up, and goes past them as a whole, in parts, and flattened."""

    def body(self, x: Tensor) -> Tensor:
        states = [x, x.flatten(0, 1).view_as(x) + 1.0]
        for block in self.blocks:
            x = x + self.through(block, states[-1] + states[0])
            states.append(states[-1] + torch.cat([x[..., :7], states[1][..., 7:]], dim=-1))
        return x + torch.stack(states).mean(0)


class InPlaceView(Net):
    """What a block returns, and a view of it, are modified in place."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
            x[:, 0].mul_(0.5)
            x.view(-1)[3:9] += 1.0
        return x


class ViewBlock(Block):
    """A block that returns a view of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(super().forward(x)).chunk(2, dim=-1)[0]


class InPlaceChunk(Net):
    """The chunk a block returns shares its storage with the half that was thrown away, and is modified in place."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=ViewBlock)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            # A chunk is one view of several, which autograd lets nobody modify; the addition makes it a tensor again.
            x = self.through(block, x).add(1.0).mul_(0.5)
        return x


@dataclass
class Carried:
    """What one block hands to the next."""

    hidden: Tensor
    extras: dict[str, Any]


class DictBlock(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        y = super().forward(state["hidden"])
        return {"hidden": y, "trail": [*state["trail"], y.mean()], "note": "kept as it is"}


class DataclassBlock(Block):
    def forward(self, state: Carried) -> Carried:
        y = super().forward(state.hidden)
        return Carried(hidden=y, extras={**state.extras, f"scale_{len(state.extras)}": (y.std(), None)})


class StructuredOutput(Net):
    """Blocks take and return a dict or a dataclass, with tensors nested in them; so does the model."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.blocks = nn.ModuleList([DictBlock(), DictBlock(), DataclassBlock(), DataclassBlock()])

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"hidden": self.embedding(tokens), "trail": []}
        for block in self.blocks[:2]:
            state = block(state)
        carried = Carried(hidden=state["hidden"], extras={})
        for block in self.blocks[2:]:
            carried = block(carried)
        penalty = sum(state["trail"]) + sum(scale for scale, _ in carried.extras.values())
        return {"loss": self.loss(carried.hidden, labels) + 0.01 * penalty.float(), "trail": state["trail"]}


class KeywordBlock(Block):
    """A block whose tensors come as keyword arguments, some of them optional, and that returns a tuple."""

    def forward(self, *, hidden: Tensor, scale: Tensor | None = None, flags: tuple[bool, ...] = ()) -> Any:
        y = super().forward(hidden if scale is None else hidden * scale)
        return (y, y.square().mean(), flags)


class KeywordArguments(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=KeywordBlock)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, energy = self.embedding(tokens), torch.zeros((), device=tokens.device)
        for index, block in enumerate(self.blocks):
            x, block_energy, _ = block(hidden=x, scale=self.scale if index == 1 else None, flags=(True,))
            energy = energy + block_energy.float()
        return self.loss(x, labels) + 0.1 * energy


class ForeignWeight(Net):
    """A block's weight is read by code that never calls the module that owns it, before and after its own forward."""

    def body(self, x: Tensor) -> Tensor:
        first, last = self.blocks[0], self.blocks[2]
        x = F.linear(F.linear(x, last.up.weight), last.down.weight)
        x = super().body(x)
        return x + F.linear(x, first.down.weight @ first.up.weight)


class DirectForward(Net):
    """Some code calls ``forward`` itself, past every hook of the module."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block.forward, x)
        return x


class RootParameters(Net):
    """The root module has parameters of its own and uses them at both ends of the forward."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.position = nn.Parameter(torch.randn(5, WIDTH) / 10)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.body(self.embedding(tokens) + self.position)
        logits = self.head(self.norm(x + self.position.mean(0))) + self.bias
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class NestedLists(Net):
    """Stages in a list, blocks in a list inside each, and one more block beside them."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=0)
        self.stages = nn.ModuleList(nn.ModuleList(Block(inner=INNER + i) for i in range(2)) for _ in range(2))
        self.between = nn.ModuleDict({"a": Block(), "b": nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))})

    def body(self, x: Tensor) -> Tensor:
        for stage, between in zip(self.stages, self.between.values(), strict=True):
            for block in stage:
                x = self.through(block, x)
            x = self.through(between, x)
        return x


class Pair(nn.Module):
    """Two blocks under one checkpoint, the inner one under its own."""

    def __init__(self, net: Net, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        # In a tuple the net is not a submodule of its own pair.
        self._net = (net,)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self._net[0].through(self.first, x))


class NestedCheckpoints(Net):
    """A recompute that recomputes."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=0)
        self.pairs = nn.ModuleList(Pair(self, Block(), Block()) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = self.through(pair, x)
        return x


class Dropout(Net):
    """Draws from the global generator in every block, again in a recompute."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=lambda: nn.Sequential(Block(), nn.Dropout(0.2), Block()))


class FailingForward(Net):
    """A batch can ask for an exception between two blocks."""

    def forward(self, tokens: Tensor, labels: Tensor, fail: bool = False) -> Tensor:
        x = self.through(self.blocks[0], self.embedding(tokens))
        x = self.through(self.blocks[1], x)
        if fail:
            raise PlannedFailure("asked for by the batch")
        return self.loss(self.through(self.blocks[2], x), labels)


def failing_batch(draw: Draw) -> Batch:
    return {**token_batch(draw), "fail": (draw.step, draw.micro_batch) in {(0, 0), (1, 0), (2, 0), (2, 2)}}


CASES = (
    Case("called_twice", CalledTwice, token_batch),
    Case("shared_block", SharedBlock, token_batch),
    Case("no_grad_call", NoGradCall, token_batch),
    Case("shared_input", SharedInput, token_batch),
    Case("crossing_skips", CrossingSkips, token_batch),
    Case("stochastic_depth", StochasticDepth, token_batch),
    Case("dense_skips", DenseSkips, token_batch),
    Case("in_place_view", InPlaceView, token_batch),
    Case("in_place_chunk", InPlaceChunk, token_batch),
    Case("structured_output", lambda _: StructuredOutput("none"), token_batch, has_checkpointing=False),
    Case("keyword_arguments", lambda _: KeywordArguments("none"), token_batch, has_checkpointing=False),
    Case("foreign_weight", ForeignWeight, token_batch),
    Case("direct_forward", DirectForward, token_batch),
    Case("root_parameters", RootParameters, token_batch),
    Case("nested_lists", NestedLists, token_batch),
    Case("nested_checkpoints", NestedCheckpoints, token_batch),
    Case("dropout", Dropout, token_batch),
    Case("failing_forward", FailingForward, failing_batch),
)
