"""Where a vertical step is done in the ordinary order, exactly, and the report says why; and what surrounds a vertical one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.case import Case
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep
from tests.exactness.shapes.blocks import VOCABULARY, WIDTH, Block, Net, token_batch

pytestmark = pytest.mark.deep

_VERTICAL = {"gradient_accumulation_steps": 3, "infinity": {"schedule": "vertical"}}


class WritesInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


class AddsToList(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        y = super().forward(x)
        seen[0] = seen[0] + y.square().mean()
        return y


class Collecting(Net):
    def body(self, x: Tensor) -> Tensor:
        seen = [x.mean()]
        for block in self.blocks:
            x = block(x, seen)
        return x + seen[0]


class SavesNarrowly(Net):
    def body(self, x: Tensor) -> Tensor:
        with _narrowly():
            return super().body(x)


class Hoards(Block):
    """Keeps what it computed where others find it."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.up(x)
        return super().forward(x)


class Hoarding(Net):
    def body(self, x: Tensor) -> Tensor:
        y = super().body(x)
        return y + sum(block.seen.mean() for block in self.blocks)


class CountsInBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1.0 + 0.01 * self.calls))


class CountsInBuffer(Net):
    """Counts its calls in a buffer before the blocks, and reads it behind them."""

    def __init__(self) -> None:
        super().__init__("none")
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().body(x) * (1.0 + 0.1 * self.calls.item())


class LayerDrop(Net):
    """Skips blocks at random, each micro-batch others."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if np.random.rand() < 0.5 or random.random() < 0.3 or torch.rand(()) < 0.2:
                continue
            x = block(x)
        return x


class Statistics(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.float().mean((0, 1)), alpha=0.1)
        return super().forward(x - self.mean.to(x.dtype))


class GradientInside(Net):
    """Differentiates the loss by itself."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        loss = self.loss(self.body(x), labels)
        (slope,) = torch.autograd.grad(loss, self.norm.weight, create_graph=True)
        return loss + slope.square().sum()


class Recomputes(Net):
    """More than a block under one checkpoint."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(
                lambda x, block=block: torch.exp(-block(x).square()), x, use_reentrant=False
            )
        return x


class HookedMemory(Net):
    """An encoder's output, with a hook, goes into all blocks and into what lies behind them."""

    def body(self, x: Tensor) -> Tensor:
        memory = self.blocks[0](x)
        memory.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        x = self.blocks[1](memory) + memory
        return self.blocks[2](x + memory)


class HookedScale(Net):
    """Its gradient comes in parts: the hook is to see their sum."""

    def __init__(self) -> None:
        super().__init__("none")
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scale.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return x


class _Doubled(torch.autograd.Function):
    """Of a user's own, with a gradient even for nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class SkipsBlocks(Net):
    def body(self, x: Tensor) -> Tensor:
        doubled = _Doubled.apply(x)
        return super().body(x) + x + doubled


def _net(kind: type[Net], block: type[nn.Module] | None = None) -> Any:
    def build(checkpointing: str) -> nn.Module:
        if block is not None:
            return kind("none", make_block=block)
        return kind("none") if kind.__init__ is Net.__init__ else kind()  # type: ignore[call-arg]

    return build


_CASES: dict[str, tuple[Any, str]] = {
    "writes its input": (_net(Net, WritesInput), "blocks.0 writes to its input"),
    "adds to what is in a list": (_net(Collecting, AddsToList), "changes a container that it is given"),
    "hoards": (_net(Hoarding, Hoards), "blocks.0 hands tensors out"),
    "counts in a block": (_net(Net, CountsInBlock), "gives another result when it is computed again"),
    "hooks for what is saved": (_net(SavesNarrowly), "hooks for saved tensors are active around blocks.0"),
    "counts in a buffer": (_net(CountsInBuffer), "changes the buffer CountsInBuffer.calls between"),
    "layer drop": (_net(LayerDrop), "micro-batches call different blocks"),
    "hooked memory": (_net(HookedMemory), "has a hook for its gradient"),
    "hooked scale": (_net(HookedScale), "a parameter that is used between blocks has a hook"),
    "skips blocks": (
        _net(SkipsBlocks),
        "function of your own computes the value that decides which blocks are skipped",
    ),
    "recomputes": (_net(Recomputes), "recomputes blocks.2 by itself"),
}


@pytest.mark.parametrize("name", _CASES)
def test_the_ordinary_order_takes_over(name: str, tmp_path: Path) -> None:
    build, reason = _CASES[name]
    np.random.seed(2)
    random.seed(1)  # with which no step drops the same layers in all micro-batches
    torch.manual_seed(1)
    with Lockstep.start(tmp_path, case=Case(name, build, token_batch), changes=_VERTICAL) as both:
        forward = both.reference.forward
        for step in range(4):
            states = torch.get_rng_state(), random.getstate(), np.random.get_state()
            drawn: list[Tensor] = []

            def forward_and_again(batch: Any, states: Any = states, drawn: list[Tensor] = drawn) -> Tensor:
                """The engine's micro-batches draw the same numbers."""
                drawn.append(forward(batch))
                if len(drawn) == 3:
                    torch.set_rng_state(states[0])
                    random.setstate(states[1])
                    np.random.set_state(states[2])
                return drawn[-1]

            both.reference.forward = forward_and_again  # type: ignore[method-assign]
            both.batch_step(step)
            assert both.engine.report.schedule == "ordinary"
            assert reason in both.engine.report.schedule_reason
        both.require_equal()


def _train(both: Lockstep, schedule: str, *, num_steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        both.batch_step(step)
        assert both.engine.report.schedule == schedule, both.engine.report.schedule_reason


def _narrowly() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (tensor.dtype, tensor.bfloat16() if tensor.is_floating_point() else tensor.clone()),
        lambda packed: packed[1].to(packed[0]),
    )


def test_hooks_around_a_step_see_what_is_saved(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=Case("net", _net(Net), token_batch), changes=_VERTICAL) as both:
        for step in range(3):
            batches = [both.batch(step, index) for index in range(3)]
            with _narrowly():
                losses = [both.reference.forward(batch) for batch in batches]
                mean = both.engine.train_batch(iter(batches))
            assert "hooks for saved tensors" in both.engine.report.schedule_reason
            for loss in losses:
                both.reference.backward(loss)
            both.reference.step()
            both.note(f"loss {step}", torch.stack(losses).detach().mean(), mean)
        both.require_equal()


def test_buffers_that_blocks_write_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Each block is called once, so its buffer is written in the same order."""
    case = Case("statistics", _net(Net, Statistics), token_batch)
    with Lockstep.start(tmp_path, case=case, changes=_VERTICAL) as both:
        _train(both, "vertical")
        both.require_equal()


class Gathering(Net):
    """Batch norms before the blocks and behind them."""

    def __init__(self) -> None:
        super().__init__("none")
        self.first, self.last = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        x = super().body(self.first(x.transpose(1, 2)).transpose(1, 2))
        return self.last(x.transpose(1, 2)).transpose(1, 2)


def test_batch_norms_between_blocks_are_those_of_plain_torch(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=Case("gathering", _net(Gathering), token_batch), changes=_VERTICAL) as both:
        _train(both, "vertical")
        both.require_equal()


class Grows(Net):
    """A table that grows with what comes, as rotary ones do, and an attribute that says how far it reaches."""

    def __init__(self) -> None:
        super().__init__("none")
        self.register_buffer("table", torch.ones(1))
        self.reach = 0

    def body(self, x: Tensor) -> Tensor:
        reach = int(1000 * x.detach().abs().max())
        if reach > self.reach:
            self.reach, self.table = reach, torch.full((1,), 1 + reach / 10_000)
        return super().body(x * self.table)


def test_a_table_that_grows_is_that_of_plain_torch(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=Case("grows", _net(Grows), token_batch), changes=_VERTICAL) as both:
        reasons = []
        for step in range(4):
            both.batch_step(step)
            reasons.append(both.engine.report.schedule_reason)
        assert "changes the buffer Grows.table between its blocks" in reasons[0]
        assert both.model.reach == both.reference.model.reach
        both.require_equal()


class WritesFromTheThirdStepOn(CountsInBuffer):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x) if self.third else Net.body(self, x)

    third = False


def test_a_buffer_that_is_written_to_later_is_noticed(tmp_path: Path) -> None:
    WritesFromTheThirdStepOn.third = False
    case = Case("later", _net(WritesFromTheThirdStepOn), token_batch)
    with Lockstep.start(tmp_path, case=case, changes=_VERTICAL) as both:
        for step in range(4):
            WritesFromTheThirdStepOn.third = step >= 2
            both.batch_step(step)
            assert (both.engine.report.schedule == "ordinary") == (step >= 2)
            assert step != 2 or "changes the buffer" in both.engine.report.schedule_reason
        both.require_equal()


def test_what_the_config_and_the_loop_decide(tmp_path: Path) -> None:
    cases = [
        ({"infinity": {"schedule": "ordinary"}, "gradient_accumulation_steps": 3}, "the config asks for it"),
        ({}, "a step has one micro-batch"),
        (
            {"gradient_accumulation_steps": 3, "zero_optimization": {"offload_param": {"device": "none"}}},
            "hardly any bytes",
        ),
    ]
    for changes, reason in cases:
        with Lockstep.start(tmp_path, changes=changes) as both:
            num = both.engine.gradient_accumulation_steps()
            both.engine.train_batch(iter([both.batch(0, index) for index in range(num)]))
            assert both.engine.report.schedule == "ordinary"
            assert reason in both.engine.report.schedule_reason
            assert both.engine.plan.placement.activation_bytes == 0


def test_what_lies_between_blocks_may_be_differentiated_in_forward(tmp_path: Path) -> None:
    case = Case("gradient inside", _net(GradientInside), token_batch)
    with Lockstep.start(tmp_path, case=case, changes=_VERTICAL) as both:
        _train(both, "vertical")
        both.require_equal()


def test_loss_function_and_batches_of_any_kind(tmp_path: Path) -> None:
    class Logits(Net):
        def forward(self, tokens: Tensor) -> Any:
            return {"logits": self.head(self.norm(self.body(self.embedding(tokens))))}

    def loss_fn(output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output["logits"].flatten(0, -2), batch[0].flatten())

    case = Case("logits", lambda _: Logits("none"), token_batch)
    with Lockstep.start(tmp_path, case=case, changes=_VERTICAL) as both:
        for step in range(2):
            batches = [(both.batch(step, index)["tokens"],) for index in range(3)]
            for batch in batches:
                both.reference.backward(loss_fn(both.reference.model(*batch), batch))
            both.reference.step()
            both.engine.train_batch(iter(batches), loss_fn=loss_fn)
            assert both.engine.report.schedule == "vertical"
        both.require_equal()


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
                assert "blocks.0 raises an error that the model catches" in both.engine.report.schedule_reason
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
