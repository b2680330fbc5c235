"""Weights that the model's own forward, or a hook, writes to: what it writes counts, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.errors import ModelError
from tests.exactness.case import Case
from tests.exactness.shapes.blocks import WIDTH, Block, Net, freeze, token_batch
from tests.exactness.written import MODES, train

pytestmark = pytest.mark.deep


class Writing(Block):
    """A block that writes to its own weights before it uses them."""

    write: Callable[[nn.Parameter], Any]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            type(self).write(self.up.weight)
        return super().forward(x)


def _clamp(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def _renormalise(weight: nn.Parameter) -> None:
    weight.div_(weight.norm(dim=0, keepdim=True)).mul_(0.75)


def _assign(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def _foreach(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.data], 0.5)


_WRITES = {"clamp": _clamp, "renormalise": _renormalise, "assign": _assign, "foreach": _foreach}


def _case(block: type[Block]) -> Case:
    return Case("writing", lambda checkpointing: Net(checkpointing, make_block=block), token_batch)


_ROWS = [(write, mode) for write in _WRITES for mode in ("in backward", "bf16 resident", "vertical")]
_ROWS += [("renormalise", mode) for mode in MODES if ("renormalise", mode) not in _ROWS]


@pytest.mark.parametrize(("write", "mode"), _ROWS)
def test_a_write_to_the_own_weight_counts(write: str, mode: str, tmp_path: Path) -> None:
    block = type("WritingBlock", (Writing,), {"write": staticmethod(_WRITES[write])})
    train(_case(block), mode, tmp_path)


class Teacher(Net):
    """A student with a momentum copy of its blocks, which follows it in forward (MoCo, BYOL, DINO)."""

    how: str

    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.teacher = nn.ModuleList([Block() for _ in self.blocks])
        for teacher, student in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
            teacher.data.copy_(student.data)
        freeze([self.teacher])

    def _follow(self) -> None:
        pairs = list(zip(self.teacher.parameters(), self.blocks.parameters(), strict=True))
        if self.how == "data":
            for teacher, student in pairs:
                teacher.data = teacher.data * 0.5 + student.data * 0.5
        elif self.how == "mul_ add_":
            with torch.no_grad():
                for teacher, student in pairs:
                    teacher.mul_(0.5).add_(student, alpha=0.5)
        else:
            with torch.no_grad():
                torch._foreach_lerp_([t for t, _ in pairs], [s.detach() for _, s in pairs], 0.5)

    def body(self, x: Tensor) -> Tensor:
        self._follow()
        with torch.no_grad():
            target = x
            for block in self.teacher:
                target = block(target)
        return super().body(x) + 0.5 * target


_HOWS = ("data", "mul_ add_", "foreach")


@pytest.mark.parametrize(
    ("how", "mode"),
    [*((how, "in backward") for how in _HOWS), *(("foreach", mode) for mode in MODES if mode != "in backward")],
)
def test_a_momentum_teacher_follows_in_forward(how: str, mode: str, tmp_path: Path) -> None:
    kind = type("MomentumTeacher", (Teacher,), {"how": how})
    train(Case("teacher", kind, token_batch), mode, tmp_path)


class Codebook(Block):
    """A block with an EMA codebook (VQ-VAE), whose weight only forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, WIDTH)
        self.codes.weight.requires_grad_(False)
        self.register_buffer("sums", self.codes.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, WIDTH)
        index = torch.cdist(flat.float(), self.codes.weight.float()).argmin(1)
        if self.training and torch.is_grad_enabled():
            onehot = nn.functional.one_hot(index, 8).to(flat.dtype)
            self.sums.mul_(0.5).add_(onehot.t() @ flat, alpha=0.5)
            self.codes.weight.data.copy_(self.sums / (onehot.sum(0).unsqueeze(1) + 1))
        found = self.codes(index).view_as(x)
        return super().forward(x + (found - x).detach())


@pytest.mark.parametrize("mode", ["in backward", "deferred", "bf16", "resident"])
def test_an_ema_codebook_moves(mode: str, tmp_path: Path) -> None:
    train(_case(Codebook), mode, tmp_path)


class _Keeping(Block):
    """A block that writes to its weight by a view from its forward before."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept.mul_(0.75)
        self.kept = self.up.weight.detach()
        return super().forward(x)


def test_a_write_that_is_seen_too_late_is_an_error(tmp_path: Path) -> None:
    case = Case("keeping", lambda checkpointing: Net(checkpointing, make_block=_Keeping), token_batch)
    with pytest.raises(ModelError, match=r"up\.weight' was written to in forward.*notices too late.*main_weights"):
        train(case, "bf16 resident", tmp_path)
