"""A Trainer's accumulated micro-batches in the vertical schedule: the plain Trainer's bits, and weights read once per step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from infinity.integrations.transformers import InfinityTrainerMixin
from tests.integration.test_trainer import _CHECKPOINTING, arguments
from tests.stand_in import models
from tests.stand_in.text import log_of, rows
from tests.twins import on_nvme

_BUDGET_BYTES = 300_000
"""Little enough for "auto" to see that the vertical schedule saves something."""
_llama = functools.partial(models.llama, num_hidden_layers=4)


class Reports(TrainerCallback):
    """Writes down each step's report of the engine."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: list[Any] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if getattr(self.trainer, "engine", None) is not None:
            self.found.append(self.trainer.engine.report)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Any]:
    """A function that trains: ``train(base, model, schedule, resume=..., **arguments)``; without a schedule as the library does.

    It gives the log, the weights and the engine's reports.
    """
    engines = []

    def run(
        base: Any,
        model: Any,
        schedule: str | None,
        *,
        resume: Any = None,
        config: Any = None,
        data: Any = None,
        budget: int = _BUDGET_BYTES,
        **changes: Any,
    ) -> Any:
        callbacks = [*changes.pop("callbacks", []), Reports()]
        kind, more = base, {}
        if schedule is not None:
            settings = on_nvme(tmp_path / "nvme", **(config or {}))
            settings["infinity"] |= {"schedule": schedule, "host_memory_budget": budget}
            more = {"infinity_config": settings}
            kind = type("OurTrainer", (InfinityTrainerMixin, base), {})
        options = {"gradient_accumulation_steps": 4, "max_steps": 4, **changes}
        trainer = kind(
            model=model,
            args=arguments(tmp_path / str(schedule), **options),
            train_dataset=data or rows(20, 32),
            callbacks=callbacks,
            **more,
        )
        callbacks[-1].trainer = trainer
        torch.manual_seed(3)
        trainer.train(resume_from_checkpoint=resume)
        if schedule is not None:
            engines.append(trainer.engine)
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return log_of(trainer.state.log_history), weights, callbacks[-1].found

    yield run
    for engine in engines:
        engine.close()


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    ("is_tied", "changes"),
    [
        (False, {"max_grad_norm": 0.5}),
        (True, {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3}),  # ten micro-batches: 3, 3, 3, 1
        (True, {"bf16": True, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5, _CHECKPOINTING: True}),
    ],
    ids=["clipped", "uneven", "surroundings"],
)
def test_bits_of_the_plain_trainer(train: Any, is_tied: bool, changes: dict[str, Any]) -> None:
    expected = train(Trainer, _llama(tie_word_embeddings=is_tied), None, **changes)
    found = train(Trainer, _llama(tie_word_embeddings=is_tied), "auto", budget=500_000, **changes)
    assert_same(found, expected)
    last = changes.get("gradient_accumulation_steps", 4) == 3
    assert [report.schedule for report in found[2]] == ["vertical"] * 3 + ["ordinary" if last else "vertical"]
    assert {report.schedule_reason for report in found[2]} == {""}


@pytest.mark.deep
def test_16_bit_weights_and_a_checkpoint_within_an_epoch(train: Any, tmp_path: Path) -> None:
    changes = {"bf16": True, "gradient_accumulation_steps": 2}  # five steps make an epoch
    config = {"bf16": {"enabled": "auto"}}
    expected = train(Trainer, _llama(), "ordinary", config=config, **changes)
    whole = train(Trainer, _llama(), "auto", config=config, save_strategy="steps", save_steps=2, **changes)
    assert_same(whole, expected)
    resumed = train(Trainer, _llama(), "auto", config=config, resume=str(tmp_path / "auto" / "checkpoint-2"), **changes)
    assert_same(resumed, expected)
    assert {report.schedule for report in whole[2] + resumed[2]} == {"vertical"}


@pytest.mark.deep
def test_bytes_do_not_grow_with_the_number_of_micro_batches(train: Any) -> None:
    moved = {}
    for schedule, num in (("auto", 2), ("auto", 6), ("ordinary", 6)):
        # Weights are much, and what goes from block to block is little.
        model, sizes = _llama(hidden_size=64, intermediate_size=128), {"per_device_train_batch_size": 1, "max_steps": 6}
        sizes |= {"gradient_accumulation_steps": num, "budget": 1_300_000}
        *_, reports = train(Trainer, model, schedule, data=rows(20, 16), **sizes)
        # The first two steps find out what is needed when.
        moved[schedule, num] = sum(report.read_bytes for report in reports[2:])
    assert moved["auto", 6] < 1.1 * moved["auto", 2]
    assert moved["ordinary", 6] > 2 * moved["auto", 6]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Does not say that it has seven micro-batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(14, 32))


@pytest.mark.deep
def test_data_that_end_within_a_step(train: Any) -> None:
    """The plain Trainer keeps the gradients for the next epoch, and so does this."""
    expected = train(Trainer, _llama(), None, data=Stream())
    found = train(Trainer, _llama(), "auto", data=Stream())
    assert_same(found, expected)
    assert [report.schedule for report in found[2]] == ["vertical", "ordinary", "ordinary", "ordinary"]
    assert (
        "the data ended within a step" in found[2][1].schedule_reason
        or "gradients of earlier" in found[2][1].schedule_reason
    )


class Weighing(Trainer):
    """A loss of its own, divided by all tokens of the step, and a step of its own around it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        inputs = {**inputs, "weight": inputs["input_ids"].float().mean()}
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss + 1

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weight, labels = inputs.pop("weight"), inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") * weight
        loss = loss / num_items_in_batch / 100
        return (loss, outputs) if return_outputs else loss


class Counting(Weighing):
    """Its metrics are no reason against it, once they are named."""

    step_records = frozenset({"seen"})
    seen = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.seen += 1
        assert self.accelerator.sync_gradients is (self.seen % 4 == 0)
        return loss


@pytest.mark.deep
def test_a_loss_of_a_subclass(train: Any) -> None:
    expected = train(Weighing, _llama(), None, max_steps=2)
    found = train(Weighing, _llama(), "auto", max_steps=2)
    assert_same(found, expected)
    assert_same(train(Counting, _llama(), "auto", max_steps=2), expected)
    assert {report.schedule for report in found[2]} == {"vertical"}


class Averaging(Weighing):
    """Each micro-batch looks at what the one before has left."""

    average = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs) * self.average
        self.average = 0.5 * self.average + loss.item()
        return loss


class Halving(Trainer):
    """Changes some gradients after each backward."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        for parameter in model.model.norm.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return loss


class Stopping(TrainerCallback):
    """Leaves a step in its midst."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 1


@pytest.mark.deep
@pytest.mark.parametrize(
    ("base", "make", "reason"),
    [
        (Trainer, functools.partial(_llama, attention_dropout=0.1), "random numbers are drawn at several places"),
        (Averaging, _llama, "a step changes OurTrainer.average, and another micro-batch may look at it"),
        (Trainer, functools.partial(_llama, tie_word_embeddings=True), "is used at several places"),  # with little room
        (Halving, _llama, "the gradient of 'model.norm.weight' is looked at or changed before the step"),
        (Trainer, _llama, "Stopping.on_substep_end is called after each micro-batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_what_would_differ_goes_one_after_the_other(train: Any, base: Any, make: Any, reason: str) -> None:
    changes = {
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
        "callbacks": [Stopping()] if "Stopping" in reason else [],
    }
    expected = train(base, make(), None, **changes)
    found = train(base, make(), "auto", **changes)
    assert_same(found, expected)
    for report in found[2]:
        assert (report.schedule, reason in report.schedule_reason) == ("ordinary", True), report.schedule_reason
