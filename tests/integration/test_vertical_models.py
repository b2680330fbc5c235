"""What a vertical step makes of hooks, modes, caches and contexts that models bring along: the bits of plain torch. And the
families of transformers that go vertically, frozen as a list: none leaves it."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.exactness.case import Case
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep
from tests.exactness.shapes.blocks import Block, Net, token_batch
from tests.exactness.vertical_families import FAMILIES, listed, make, schedules

_VERTICAL: dict[str, Any] = {"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}}


def _train(both: Lockstep) -> None:
    for step in range(3):
        both.batch_step(step)
        assert both.engine.report.schedule == "vertical", both.engine.report.schedule_reason
    both.require_equal()


def _each(both: Lockstep) -> tuple[nn.Module, nn.Module]:
    return both.reference.model, both.model


def test_hooks_of_the_user(tmp_path: Path) -> None:
    """On results of blocks, on parameters, on modules, forward and backward; the number of their calls is the same."""
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["plain"], changes=_VERTICAL) as both:
        calls: list[list[str]] = [[], []]
        for model, seen in zip(_each(both), calls, strict=True):

            def clamp(gradient: Tensor, seen: list[str]) -> Tensor:
                seen.append("clamp")
                return gradient.clamp(-1e-3, 1e-3)

            def halve(gradient: Tensor, seen: list[str]) -> Tensor:
                seen.append("halve")
                return gradient * 0.5

            def on_output(module: nn.Module, args: Any, output: Tensor, seen: list[str]) -> Tensor:
                seen.append("forward")
                if output.requires_grad:
                    output.register_hook(functools.partial(clamp, seen=seen))
                return output * 1.5

            def on_input(module: nn.Module, args: Any, seen: list[str]) -> Any:
                seen.append("before")
                return (args[0] + 0.25,)

            def on_backward(module: nn.Module, grad_input: Any, grad_output: Any, seen: list[str]) -> Any:
                seen.append("backward")
                return (grad_input[0] * 0.75,)

            blocks: Any = model.blocks
            blocks[0].register_forward_hook(functools.partial(on_output, seen=seen))
            blocks[1].register_forward_pre_hook(functools.partial(on_input, seen=seen))
            blocks[2].register_full_backward_hook(functools.partial(on_backward, seen=seen))
            blocks[1].up.weight.register_hook(functools.partial(halve, seen=seen))
            model.get_parameter("head.weight").register_hook(functools.partial(halve, seen=seen))
        _train(both)
        assert sorted(calls[0]) == sorted(calls[1])


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_autocast_around_the_step(changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes={**_VERTICAL, **changes}) as both:
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        both.reference.model.forward = autocast(both.reference.model.forward)
        both.engine.train_batch = autocast(both.engine.train_batch)
        _train(both)


class AutocastInside(Net):
    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[1](x)
        with torch.autocast("cpu", enabled=False):
            return self.blocks[2](x.to(self.norm.weight.dtype))


class Bare(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) @ self.down.weight.T


class CopiesForward(Block):
    """As a copy of one of its modules does."""

    def forward(self, x: Tensor) -> Tensor:
        copied = copy.deepcopy(self.up.__dict__.get("forward"))
        assert copied is None or inspect.isfunction(copied)
        return super().forward(x)


class FansOut(Net):
    """One result goes into two blocks, and past both: of the three parts of its gradient, the last one comes first."""

    def __init__(self) -> None:
        super().__init__("none", make_block=Bare)

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) + self.blocks[2](x) + x


@pytest.mark.parametrize(
    "make",
    [lambda: AutocastInside("none"), FansOut, lambda: Net("none", make_block=CopiesForward)],
    ids=["within autocast", "a result that goes several ways", "that copy a forward"],
)
def test_blocks(make: Any, tmp_path: Path) -> None:
    case = Case("blocks", lambda _: make(), token_batch)
    with Lockstep.start(tmp_path, case=case, changes=_VERTICAL) as both:
        _train(both)


@pytest.mark.deep(but=6)
@pytest.mark.parametrize(
    ("name", "variant", "expected"), [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in listed()]
)
def test_a_family_goes_as_it_is_written(name: str, variant: str, expected: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about its configs
        model = make(FAMILIES[name], variant)
        assert model is not None
        found = [reason for _, reason in schedules(model, FAMILIES[name].batch, tmp_path)]
    assert found == expected
