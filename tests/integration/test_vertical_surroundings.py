"""What surrounds a vertical step: the iterator's memory, the process's settings, threads, tensors between blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.exactness.case import Case
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep
from tests.exactness.shapes.blocks import VOCABULARY, Block, Net, token_batch

pytestmark = pytest.mark.deep

_VERTICAL: dict[str, Any] = {"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}}


def _train(both: Lockstep, schedule: str, *, num_steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        both.batch_step(step)
        assert both.engine.report.schedule == schedule, both.engine.report.schedule_reason


def _case(kind: type[Net], block: type[nn.Module] = Block) -> Case:
    return Case(kind.__name__, lambda _: kind("none", make_block=block), token_batch)


@pytest.mark.parametrize("how", ["same tensors", "same dict"])
def test_an_iterator_that_fills_the_same_memory_again(how: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["plain"], changes=_VERTICAL) as both:
        memory: dict[str, Tensor] = {}

        def filled(batches: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
            for batch in batches:
                for name, values in batch.items():
                    if how == "same dict" or name not in memory:
                        memory[name] = values.clone()
                    memory[name].copy_(values)
                yield memory

        for step in range(3):
            first = both.batch(step).items()
            batches = [{name: (values + index) % VOCABULARY for name, values in first} for index in range(3)]
            for batch in batches:
                both.reference.backward(both.reference.forward(batch))
            both.reference.step()
            both.engine.train_batch(filled(batches))
            assert both.engine.report.schedule == "vertical", both.engine.report.schedule_reason
        both.require_equal()


class EarlySkip(Net):
    """Three terms meet in ``x``: those of the skip come last, though it is used behind the blocks."""

    def body(self, x: Tensor) -> Tensor:
        skip = x * torch.sigmoid(x)
        early = x.tanh() * x
        for block in self.blocks:
            x = block(x)
        return (x + skip) * early.exp()


def test_what_is_computed_before_blocks_and_used_behind_them(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=_case(EarlySkip), changes=_VERTICAL) as both:
        _train(both, "vertical")
        both.require_equal()


class Fails(Block):
    """Fails where a class attribute says so."""

    is_due = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_due:
            raise LookupError("as asked for")
        return super().forward(x)


class Recovers(Net):
    """Catches what a block raises."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except LookupError:
                x = x * 2
        return x


@pytest.mark.parametrize("kind", [Net, Recovers])
def test_what_a_block_raises_reaches_the_model(kind: type[Net], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=_case(kind, Fails), changes=_VERTICAL) as both:
        _train(both, "vertical", num_steps=2)
        batches = [both.batch(2, index) for index in range(3)]
        Fails.is_due = True
        try:
            if kind is Net:
                with pytest.raises(LookupError, match="as asked for"):
                    both.engine.train_batch(iter(batches))
            else:
                both.engine.train_batch(iter(batches))
                assert "blocks.0 raises an error, and the model goes on" in both.engine.report.schedule_reason
                for batch in batches:
                    both.reference.backward(both.reference.forward(batch))
                both.reference.step()
        finally:
            Fails.is_due = False
        _train(both, "vertical", first=3)
        both.require_equal()


def test_a_hook_for_an_accumulated_gradient(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["plain"], changes=_VERTICAL) as both:
        _train(both, "vertical", num_steps=1)
        handle = both.model.get_parameter("head.weight").register_post_accumulate_grad_hook(lambda parameter: None)
        _train(both, "ordinary", num_steps=1, first=1)
        assert "hook for its accumulated gradient" in both.engine.report.schedule_reason
        handle.remove()
        _train(both, "vertical", num_steps=1, first=2)
        both.require_equal()


class WritesMaskLater(Net):
    """Writes to what an earlier block was given, when a token says so."""

    writes = False

    def body(self, x: Tensor) -> Tensor:
        mask = torch.linspace(0, 1, x.shape[-1]).expand_as(x).clone()
        for index, block in enumerate(self.blocks):
            x = block(x, mask)
            if index == 1 and self.writes:
                mask.mul_(-3.0)
        return x


class MaskedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * 2 + mask)


@pytest.mark.parametrize("spills", [False, True])
def test_an_input_that_has_left_memory_is_written_to(spills: bool, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=_case(WritesMaskLater, MaskedBlock), changes=_VERTICAL) as both:
        if spills:
            object.__setattr__(both.engine._vertical._on, "activation_bytes", 0)
        _train(both, "vertical", num_steps=2)
        WritesMaskLater.writes = True
        try:
            _train(both, "ordinary", num_steps=2, first=2)
        finally:
            WritesMaskLater.writes = False
        both.require_equal()
        assert "written to after the block has used it" in both.engine.report.schedule_reason


class Conjugated(Net):
    def body(self, x: Tensor) -> Tensor:
        values = torch.complex(x, x.flip(-1))
        for block in self.blocks:
            values = block(values).conj()
        return values.real + values.imag


class ComplexBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(super().forward(x.real), super().forward(x.imag))


def test_a_conjugated_input_beyond_the_budget(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=_case(Conjugated, ComplexBlock), changes=_VERTICAL) as both:
        object.__setattr__(both.engine._vertical._on, "activation_bytes", 0)
        _train(both, "vertical")
        both.require_equal()
