"""Shapes that differ in the parameters themselves: how large, in what layout, shared with whom, of which dtype."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.exactness.case import Batch, Case, Draw
from tests.exactness.shapes.blocks import INNER, WIDTH, Block, Net, float_batch, squared_error, token_batch


class TiedWeights(Net):
    """The head is the embedding, and two blocks share a weight."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.head.weight = self.embedding.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight


class OddSizes(nn.Module):
    """Nothing is a multiple of anything: sizes of 1, primes, a parameter without elements."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        sizes = [7, 13, 1, 31, 67, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.1
        return squared_error(x, target) + self.empty.float().sum()


def odd_batch(draw: Draw) -> Batch:
    return {"x": draw.floats(1, 7), "target": draw.floats(1, 3)}


class ScalarBlock(Block):
    """A block with a gate of no dimensions and a gain of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.gain = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate + self.gain * super().forward(x)


class Scalars(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=ScalarBlock)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().loss(x / self.temperature, labels)


class TransposedBlock(nn.Module):
    """The parameters are strided views in memory, and used as they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(INNER, WIDTH).t() / 5)
        self.down = nn.Parameter(torch.randn(WIDTH, 2, INNER // 2).permute(1, 2, 0) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.up) @ self.down.flatten(0, 1)


class Transposed(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=TransposedBlock)


class MixedBlock(Block):
    """One weight of another dtype than the rest, until the cast to the compute dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up.to(torch.bfloat16)


class MixedDtypes(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=MixedBlock)
        self.embedding.to(torch.bfloat16)


class QuantizedBlock(nn.Module):
    """A frozen integer weight with a trainable scale."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.Parameter(torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 1 / 400))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.levels.to(x.dtype) * self.scale)


class Quantized(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=QuantizedBlock)


class ParametrizedBlock(Block):
    """Weights that are computed from others at every access, one of them with a buffer that the forward updates."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.up)
        parametrizations.spectral_norm(self.down)


class Parametrized(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=ParametrizedBlock)


class ContainerBlock(nn.Module):
    """Parameters in torch's own containers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 8 for _ in range(2)])
        self.biases = nn.ParameterDict({"b": torch.zeros(WIDTH), "a": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases.values(), strict=True):
            x = x + torch.tanh(F.linear(x, weight, bias))
        return x


class Containers(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, make_block=ContainerBlock)


class BigEmbedding(Net):
    """One table is larger than all the blocks together."""

    num_rows = 1000

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(self.num_rows, WIDTH)


def big_batch(draw: Draw) -> Batch:
    return {**token_batch(draw), "tokens": draw.integers(BigEmbedding.num_rows, 2, 5)}


class KeptReferences(nn.Module):
    """A model that keeps a list of its weights, taken before training, and computes with what is in it."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.references = [layer.weight for layer in self.layers]

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for weight in self.references:
            x = x + F.linear(x, weight)
        return squared_error(x, target)


CASES = (
    Case("tied_weights", TiedWeights, token_batch),
    Case("odd_sizes", OddSizes, odd_batch, has_checkpointing=False),
    Case("scalars", Scalars, token_batch),
    Case("transposed", Transposed, token_batch),
    Case("mixed_dtypes", MixedDtypes, token_batch),
    Case("quantized", Quantized, token_batch),
    Case("parametrized", Parametrized, token_batch),
    Case("containers", Containers, token_batch),
    Case("big_embedding", BigEmbedding, big_batch),
    Case("kept_references", KeptReferences, float_batch, has_checkpointing=False),
)
