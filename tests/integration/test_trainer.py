"""`InfinityTrainer` gives the bits of the plain Trainer, whatever that does, and micro-batches in the vertical schedule; killed
ones are in `test_thirty_steps`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import infinity
from infinity.errors import ConfigError, StepError
from infinity.integrations.transformers import InfinityTrainer, InfinityTrainerMixin, newest_checkpoint
from tests.stand_in import models
from tests.stand_in.text import log_of, rows
from tests.twins import on_nvme

_CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)
"""transformers before 5.23 knows the second name only."""


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    settings |= {"logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3}
    return TrainingArguments(output_dir=str(directory), **{**settings, **changes})


def trained(
    directory: Path, config: dict[str, Any] | None, model: Any, *, callbacks: Any = None, **changes: Any
) -> Any:
    """A Trainer that has trained ``model``: plain without a config."""
    kind: Any = Trainer if config is None else InfinityTrainer
    more = {"callbacks": callbacks} | ({} if config is None else {"infinity_config": config})
    data = {"train_dataset": rows(16, 32), "eval_dataset": rows(4, 32, first=80)}
    trainer = kind(model=model, args=arguments(directory, **changes), **data, **more)
    trainer.train()
    return trainer


def assert_same_weights(first: Path, second: Path) -> None:
    expected, found = load_file(first), load_file(second)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_one_process_takes_one_of_several_gpus(tmp_path: Path) -> None:
    """Of several, the Trainer would make `nn.DataParallel`, whose copies of a paged model have no weights."""
    settings = arguments(tmp_path)
    assert settings.n_gpu == 0
    settings._n_gpu = 2
    model = models.llama()
    assert InfinityTrainer(model=model, args=settings, infinity_config=on_nvme(tmp_path / "nvme")).args.n_gpu == 1


@pytest.mark.deep
def test_what_the_trainer_does_around_a_step(tmp_path: Path) -> None:
    """Autocast, label smoothing, NEFTune, checkpointing, no clipping, a short last step, the best model, rotation."""
    options: dict[str, Any] = {"bf16": True, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5}
    options |= {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, _CHECKPOINTING: True}
    options |= {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2}
    options |= {"save_steps": 2, "save_total_limit": 1}
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # the first one is the best
    plain = trained(tmp_path / "plain", None, models.gpt2(), **options)
    ours = trained(tmp_path / "ours", on_nvme(tmp_path / "nvme"), models.gpt2(), **options)
    assert log_of(ours.state.log_history) == log_of(plain.state.log_history)
    assert Path(ours.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name == "checkpoint-2"
    folders = [sorted(path.name for path in (tmp_path / kind).glob("checkpoint-*")) for kind in ("plain", "ours")]
    assert folders[0] == folders[1]
    assert ours.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    for trainer, name in ((plain, "a"), (ours, "b")):
        trainer.save_model(str(tmp_path / name))
    assert_same_weights(tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors")
    prompt = torch.arange(5)[None]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(ours.model.generate(prompt, **settings), plain.model.generate(prompt, **settings))
    assert {path.name for path in (tmp_path / "b").iterdir()} == {path.name for path in (tmp_path / "a").iterdir()}
    ours.engine.close()


class Nudging(TrainerCallback):
    """Changes gradients before the step, and keeps what they were."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, **objects: Any) -> None:
        for parameter in objects["model"].parameters():
            self.seen.append(parameter.grad.square().sum().item())
            parameter.grad.add_(1e-3)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("max_norm", [0.5, 0.0])
def test_a_callback_that_comes_before_the_step(max_norm: float, tmp_path: Path) -> None:
    """It sees gradients that are clipped, and their norm is that before it."""
    found = []
    for config in (None, on_nvme(tmp_path / "nvme", gradient_clipping="auto")):
        nudging = Nudging()
        options = {"gradient_accumulation_steps": 2, "max_grad_norm": max_norm}
        trainer = trained(tmp_path, config, models.llama(), callbacks=[nudging], **options)
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        found.append((log_of(trainer.state.log_history), nudging.seen, weights))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(value, found[1][2][name]) for name, value in found[0][2].items())
    trainer.engine.close()


def test_a_callback_that_comes_after_the_engine(tmp_path: Path) -> None:
    config, data = on_nvme(tmp_path / "nvme"), rows(4, 32)
    settings = {"train_dataset": data, "eval_dataset": data, "infinity_config": config}
    trainer: Any = InfinityTrainer(model=models.llama(), args=arguments(tmp_path), **settings)
    trainer.evaluate()
    trainer.add_callback(Nudging())
    with pytest.raises(StepError, match=r"on_pre_optimizer_step was added.*before the first train"):
        trainer.train()
    trainer.engine.close()


@pytest.mark.deep
def test_optimizer_and_scheduler_of_the_config(tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    plain = trained(tmp_path / "plain", None, models.llama(), warmup_steps=2, weight_decay=0.0)
    ours = trained(tmp_path / "ours", on_nvme(tmp_path / "nvme", optimizer=adam), models.llama(), warmup_steps=2)
    assert log_of(ours.state.log_history) == log_of(plain.state.log_history)
    ours.engine.close()
    rates = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    schedule = {"type": "WarmupDecayLR", "params": {**rates, "warmup_type": "linear"}}
    config = on_nvme(tmp_path / "nvme", optimizer=adam, scheduler=schedule)
    ours = trained(tmp_path / "scheduled", config, models.llama(), warmup_steps=2)
    found = [entry["learning_rate"] for entry in ours.state.log_history if "learning_rate" in entry]
    assert found == [0.0, 0.0, 0.0005, 0.001]  # as DeepSpeed's does it
    assert type(ours.lr_scheduler).__name__ == "WarmupDecayLR"
    ours.engine.close()


def test_evaluation_before_and_without_training(tmp_path: Path) -> None:
    data = rows(4, 32)
    trainers = []
    for train_data in (data, None):
        model, config = models.llama(), on_nvme(tmp_path / "nvme")
        trainers.append(
            InfinityTrainer(
                model, arguments(tmp_path), train_dataset=train_data, eval_dataset=data, infinity_config=config
            )
        )
    plain = Trainer(models.llama(), arguments(tmp_path), eval_dataset=data).evaluate()["eval_loss"]
    assert [trainer.evaluate()["eval_loss"] for trainer in trainers] == [plain, plain]
    assert [trainer.engine.optimizer is None for trainer in trainers] == [False, True]
    trainers[0].train()
    for trainer in trainers:
        trainer.engine.close()


@pytest.mark.deep
def test_a_durable_run_and_the_trainers_steps(tmp_path: Path) -> None:
    """It goes on with a checkpoint of the Trainer's, and not beside its count; who only evaluates has none."""
    config = on_nvme(tmp_path / "nvme")
    config["infinity"]["durable"] = True
    expected = trained(tmp_path, config, models.llama(), max_steps=4)
    values = {name: value.clone() for name, value in expected.model.state_dict().items()}
    expected.engine.close()
    config["infinity"]["durable_path"] = str(tmp_path / "other")

    class Stopping(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = state.global_step == 3

    stopped = trained(tmp_path, config, models.llama(), save_strategy="steps", save_steps=2, callbacks=[Stopping()])
    stopped.engine.close()
    data = {"train_dataset": rows(16, 32), "infinity_config": config}
    again = InfinityTrainer(models.llama(), arguments(tmp_path), **data)
    with pytest.raises(StepError, match=r"is at step 3 already.*resume_from_checkpoint=True.*durable_path"):
        again.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(value, values[name]) for name, value in again.model.state_dict().items())
    again.engine.close()
    evaluating = InfinityTrainer(models.llama(), arguments(tmp_path), eval_dataset=rows(4, 32), infinity_config=config)
    plain = Trainer(models.llama(), arguments(tmp_path), eval_dataset=rows(4, 32)).evaluate()["eval_loss"]
    assert evaluating.evaluate()["eval_loss"] == plain
    evaluating.engine.close()


def test_a_save_that_fails_leaves_the_weights_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "plain", tmp_path / "ours"]
    for folder, config in zip(folders, (None, on_nvme(tmp_path / "nvme")), strict=True):
        trainer = trained(tmp_path, config, models.llama())
        trainer.save_model(str(folder))
    assert {path.name for path in folders[1].iterdir()} == {path.name for path in folders[0].iterdir()}
    assert_same_weights(*(folder / "model.safetensors" for folder in folders))
    found = (folders[1] / "model.safetensors").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr(infinity.Engine, "save_pretrained", fail)
    with pytest.raises(OSError):
        trainer.save_model(str(folders[1]))
    assert (folders[1] / "model.safetensors").read_bytes() == found
    trainer.engine.close()


@pytest.mark.deep
def test_a_training_after_one_that_was_cut_off(tmp_path: Path) -> None:
    """In the backward of its third step, as by Ctrl-C in a notebook."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def fail_in_backward(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    class Failing(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, model: Any, **___: Any) -> None:
            if state.global_step == 2:
                self.handle = model.model.layers[0].mlp.register_forward_hook(fail_in_backward)

    found = []
    for config in (None, on_nvme(tmp_path / "nvme")):
        kind: Any = Trainer if config is None else InfinityTrainer
        more = {} if config is None else {"infinity_config": config}
        failing = Failing()
        trainer = kind(models.llama(), arguments(tmp_path), train_dataset=rows(16, 32), callbacks=[failing], **more)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        failing.handle.remove()
        trainer.remove_callback(failing)
        trainer.train()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        found.append((log_of(trainer.state.log_history), weights))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    trainer.engine.close()


@pytest.mark.deep(but=3)
@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        ({"gradient_clipping": 0.5}, {}, ["gradient_clipping", "max_grad_norm 1.0", '"auto"']),
        ({"torch_autocast": {"enabled": True}}, {}, ["torch_autocast"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, {}, ["optimizer.params.lr", "learning_rate"]),
        ({"bf16": {"enabled": False}, "gradient_clipping": 3}, {"bf16": True}, ["bf16.enabled", "max_grad_norm"]),
        ({}, {"auto_find_batch_size": True}, ["auto_find_batch_size", "per_device"]),
        ({}, {"bf16_full_eval": True}, ["bf16_full_eval", "bf16"]),
    ],
)
def test_conflicts_are_named(config: dict[str, Any], changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        InfinityTrainer(
            models.llama(), arguments(tmp_path, **changes), infinity_config=on_nvme(tmp_path / "nvme", **config)
        )
    assert all(word in str(raised.value) for word in words)


def test_a_plain_trainer_around_a_held_model(tmp_path: Path) -> None:
    """It trains and saves as without an engine; or it would have to be refused."""
    expected = trained(tmp_path / "plain", None, models.llama(), lr_scheduler_type="constant")
    model = models.llama()
    groups = expected.create_optimizer().param_groups
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=groups[0]["fused"])
    config = on_nvme(tmp_path / "nvme", train_batch_size=2, gradient_clipping=0.0)  # the Trainer clips
    with infinity.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
        trainer = Trainer(
            model,
            arguments(tmp_path / "held", lr_scheduler_type="constant"),
            train_dataset=rows(16, 32),
            optimizers=(engine.optimizer, None),
        )
        trainer.train()
        assert log_of(trainer.state.log_history) == log_of(expected.state.log_history)
        trainer.save_model(str(tmp_path / "a"))
    expected.save_model(str(tmp_path / "b"))
    assert_same_weights(tmp_path / "b" / "model.safetensors", tmp_path / "a" / "model.safetensors")


def test_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name, text in (("checkpoint-9", "{}"), ("checkpoint-10", "{}"), ("checkpoint-11", "{"), ("checkpoint-x", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-12").mkdir()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


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
