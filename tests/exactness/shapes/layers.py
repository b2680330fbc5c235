"""Shapes made of torch's own layers, whose kernels take weights in ways of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import Batch, Case, Draw
from tests.exactness.shapes.blocks import WIDTH, Net, token_batch


class ConvBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, padding=1, groups=groups)
        self.norm = nn.GroupNorm(2, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class Convolutions(Net):
    """Convolutions whose weights lie channels last in memory."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=0)
        del self.embedding, self.norm, self.head
        self.blocks = nn.ModuleList([ConvBlock(3, 8), ConvBlock(8, 8, groups=2), ConvBlock(8, 6)])
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.up(self.body(x.to(memory_format=torch.channels_last)))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


def image_batch(draw: Draw) -> Batch:
    return {"x": draw.floats(2, 3, 6, 6), "labels": draw.integers(5, 2)}


class BatchNorms(Net):
    """Buffers that the forward updates: they are not paged, and a recompute updates them twice."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=0)
        del self.embedding, self.norm, self.head
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(3 * 36, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x).flatten(1)).float(), labels)


class EncoderLayers(Net):
    """nn.TransformerEncoderLayer: attention reads its output projection's weight itself; eval takes a fused path."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__(
            checkpointing,
            num_blocks=2,
            make_block=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 40, dropout=0.0, batch_first=True),
        )


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Separate sizes for keys and values make torch keep three projection weights instead of one.
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=16, batch_first=True)
        self.values = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, self.values(x), need_weights=False)[0]


class Attention(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=2, make_block=AttentionBlock)


class RecurrentBlock(nn.Module):
    """An LSTM keeps a list of its weights and hands it to one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Recurrent(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing, num_blocks=2, make_block=RecurrentBlock)


class BagNet(nn.Module):
    """An EmbeddingBag, a Bilinear and a PReLU: one-parameter layers in a Sequential without blocks."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, WIDTH, mode="mean")
        self.pair = nn.Bilinear(WIDTH, WIDTH, 6)
        self.tail = nn.Sequential(nn.PReLU(), nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 5))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.bag(tokens)
        return F.cross_entropy(self.tail(self.pair(x, x.flip(-1))).float(), labels)


def bag_batch(draw: Draw) -> Batch:
    return {"tokens": draw.integers(50, 4, 3), "labels": draw.integers(5, 4)}


CASES = (
    Case("convolutions", Convolutions, image_batch),
    Case("batch_norms", BatchNorms, image_batch),
    Case("encoder_layers", EncoderLayers, token_batch),
    Case("attention", Attention, token_batch),
    Case("recurrent", Recurrent, token_batch),
    Case("bag", BagNet, bag_batch, has_checkpointing=False),
)
