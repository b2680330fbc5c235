"""``engine.save_checkpoint`` and ``engine.load_checkpoint``: a training goes on bit for bit, whatever happens to the process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import CheckpointError, ModelError
from tests.exactness.lockstep import BF16, IN_MEMORY, engine_on_nvme, everything_on_nvme
from tests.internals import checkpoint_loading, main
from tests.internals import saved as saved_files
from tests.states import everything, require_equal, state_of

_SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "remainder": BF16,
    "fp32 beside bf16": {**BF16, "infinity": {"main_weights": "fp32"}},
    "in memory": {**BF16, **IN_MEMORY},
    "dynamic fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}},
    "int8 states": {**BF16, "infinity": {"state_dtype": "int8"}},
    "int8_dynamic states": {**BF16, "infinity": {"state_dtype": "int8_dynamic"}},
    "clipped": {**BF16, "gradient_clipping": 0.1},
}


class Model(nn.Module):
    """With statistics, something frozen, an integer, tied weights, and a layer that is used late."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 96)
        self.norm = nn.BatchNorm1d(96)
        self.late = nn.Linear(8, 96)
        self.frozen = nn.Linear(96, 8).requires_grad_(False)
        self.number = nn.Parameter(torch.tensor([2**53 + 1 + seed]), requires_grad=False)
        self.last = nn.Linear(8, 96)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("aside", torch.tensor(float(seed)), persistent=False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.seen += 1
        x = x.to(self.first.weight.dtype)
        hidden = self.norm(self.first(x)) + (self.late(x) if step > 2 else 0)
        return (self.last(self.frozen(hidden).relu()) * self.scale).float().square().mean()


@contextmanager
def training(directory: Path, changes: dict[str, Any], seed: int = 0) -> Iterator[Any]:
    directory.mkdir(exist_ok=True)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    with engine_on_nvme(directory, Model(seed), {"optimizer": optimizer, "scheduler": _SCHEDULER, **changes}) as engine:
        yield engine


def steps_of(engine: Any, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(torch.randn(4, 8, generator=generator), step)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("mode", MODES)
def test_a_training_goes_on_bit_for_bit(mode: str, tmp_path: Path) -> None:
    changes = {**MODES[mode], "gradient_accumulation_steps": 2}
    with training(tmp_path / "drive", changes) as engine:
        steps_of(engine, 0, 1)
        assert engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3, "rng": torch.ones(2)})
        before = everything(engine)
        losses = steps_of(engine, 2, 3)
        expected = everything(engine)
    assert (tmp_path / "saved" / "latest").read_text() == "global_step2"
    with training(tmp_path / "drive", changes, seed=1) as engine:
        folder, client_state = engine.load_checkpoint(tmp_path / "saved")
        assert folder == str(tmp_path / "saved" / "global_step2")
        assert client_state["epoch"] == 3 and torch.equal(client_state["rng"], torch.ones(2))
        assert float(engine.module.aside) == 1
        require_equal(everything(engine), before)
        assert steps_of(engine, 2, 3) == losses
        require_equal(everything(engine), expected)


@pytest.mark.deep
def test_parts_are_loaded_as_deepspeed_loads_them(tmp_path: Path) -> None:
    with training(tmp_path / "drive", BF16) as engine:
        steps_of(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved", tag="one", save_latest=False)
        saved = everything(engine)
    with training(tmp_path / "drive", BF16, seed=1) as engine:
        for place, tag in (("saved", None), ("saved", "two"), ("typo", None), ("typo", "one")):
            advice = "give its tag: 'one'" if place == "saved" else "that engine.save_checkpoint has written to"
            with pytest.raises(CheckpointError, match=rf"there is no .* in it.*{advice}.*missing_ok=True"):
                engine.load_checkpoint(tmp_path / place, tag=tag)
            assert engine.load_checkpoint(tmp_path / place, tag=tag, missing_ok=True) == (None, None)
        engine.load_checkpoint(tmp_path / "saved", tag="one", load_module_only=True)
        assert engine.global_steps == 0
        assert torch.equal(engine.module.first.weight.clone(), saved["first.weight"])
        assert not engine._parts.consistent.has_state(engine.module.first.weight)
        engine.load_checkpoint(
            tmp_path / "saved", tag="one", load_optimizer_states=False, load_lr_scheduler_states=False
        )
        assert engine.global_steps == 2 and not engine._parts.consistent.has_state(engine.module.first.weight)
        assert engine.lr_scheduler.state_dict()["last_epoch"] != 2
        engine.load_checkpoint(tmp_path / "saved", tag="one")
        require_equal(everything(engine), saved)


@pytest.mark.deep
@pytest.mark.parametrize("saved_in_between", [False, True])
def test_the_first_step_after_loading_is_a_whole_one(saved_in_between: bool, tmp_path: Path) -> None:
    """Whatever the accumulation steps were, and where in a step it was saved: its gradients are not in the checkpoint."""
    with training(tmp_path / "drive", {"gradient_accumulation_steps": 2}) as engine:
        steps_of(engine, 0)
        if saved_in_between:
            engine.backward(engine(torch.ones(4, 8), 1))
            engine.step()
        engine.save_checkpoint(tmp_path / "saved")
    with training(tmp_path / "drive", {"gradient_accumulation_steps": 4}, seed=1) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        for number in range(4):
            assert engine.is_gradient_accumulation_boundary() == (number == 3)
            engine.backward(engine(torch.ones(4, 8), 1))
            engine.step()
        assert engine.was_step_applied() and engine.global_steps == 2


def test_a_crash_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.internals import publish

    images: list[Path] = []

    def photograph(*_: Any) -> None:
        images.append(tmp_path / f"image{len(images)}")
        shutil.copytree(tmp_path / "saved", images[-1])

    with training(tmp_path / "drive", BF16) as engine:
        steps_of(engine, 0)
        engine.save_checkpoint(tmp_path / "saved", tag="here")
        old = everything(engine)
        steps_of(engine, 1)
        new = everything(engine)
        exchange, rename = publish.exchange, publish.rename
        monkeypatch.setattr(saved_files, "exchange", lambda *a: (photograph(), exchange(*a), photograph()))
        monkeypatch.setattr(publish, "rename", lambda *a: (photograph(), rename(*a), photograph()))
        engine.save_checkpoint(tmp_path / "saved", tag="here")
        engine.save_checkpoint(tmp_path / "saved", tag="there")
        monkeypatch.undo()
        names = {path.name for path in (tmp_path / "saved").iterdir()}
        assert names == {"here", "there", "latest"} and (tmp_path / "saved" / "latest").read_text() == "there"
        seen = []
        for image in images:
            folder, _ = engine.load_checkpoint(image)
            found = everything(engine)
            seen.append((Path(folder).name, engine.global_steps == 2))
            require_equal(found, new if seen[-1][1] else old)
    assert seen[0] == ("here", False) and seen[-1] == ("there", True)
    assert seen == sorted(seen)


@pytest.mark.deep
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with training(tmp_path / "drive", BF16) as engine:
        steps_of(engine, 0)
        engine.save_checkpoint(tmp_path / "saved")
    drive = everything_on_nvme(tmp_path / "drive", BF16)
    other = Model(1)
    other.late = nn.Linear(8, 95)
    with infinity.initialize(model=other, config=drive)[0] as engine:
        before = everything(engine)
        with pytest.raises(ModelError, match=r"'late.weight' has shape \(96, 8\), not \(95, 8\)"):
            engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        require_equal(everything(engine), before)
    less = Model(1)
    del less.late
    less.more = nn.Linear(2, 2)
    with infinity.initialize(model=less, config=drive)[0] as engine:
        with pytest.raises(ModelError, match=r"'more.weight' is missing") as caught:
            engine.load_checkpoint(tmp_path / "saved")
        assert "'late.weight' is not in the model" in str(caught.value)
        caplog.clear()
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False, load_optimizer_states=False)
        assert engine.global_steps == 1
    (told,) = [each.getMessage() for each in caplog.records if "load_module_strict" in each.getMessage()]
    assert "'more.weight', 'more.bias' (not in the checkpoint, and as before)" in told
    assert "'late.weight', 'late.bias' (not in the model, and left out)" in told


def _groups(model: Model, order: str) -> list[dict[str, Any]]:
    """Of a training with two groups; ``order`` says how they are given."""
    first, second = [model.first.weight, model.first.bias, model.norm.weight], [model.late.weight, model.last.bias]
    groups = [{"params": first, "lr": 1e-2}, {"params": second, "lr": 1e-3}]
    if order == "other groups":
        groups.reverse()
    if order == "other parameters":
        for group in groups:
            group["params"] = list(reversed(cast(list[nn.Parameter], group["params"])))
    if order == "fewer":
        groups[0]["params"] = first[:2]
    grouped = {id(parameter) for group in groups for parameter in cast(list[nn.Parameter], group["params"])}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in grouped)
    return groups


@contextmanager
def _in_groups(directory: Path, order: str, changes: dict[str, Any] | None = None) -> Iterator[Any]:
    directory.mkdir(exist_ok=True)
    model = Model()
    with engine_on_nvme(
        directory,
        model,
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **(changes or {})},
        model_parameters=_groups(model, order),
    ) as engine:
        yield engine


@pytest.mark.deep
@pytest.mark.parametrize("order", ["other parameters", "other groups", "fewer"])
def test_states_go_by_name_and_never_to_another_group(order: str, tmp_path: Path) -> None:
    with _in_groups(tmp_path / "drive", "") as engine:
        steps_of(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved")
        losses = steps_of(engine, 2, 3)
    with _in_groups(tmp_path / "drive", order) as engine:
        if order == "other parameters":
            engine.load_checkpoint(tmp_path / "saved")
            assert steps_of(engine, 2, 3) == losses
        else:
            here = {"other groups": "group 0", "fewer": "none"}[order]
            with pytest.raises(
                ValueError, match=rf"is in group \d of the checkpoint's optimizer, and in {here} of this one"
            ):
                engine.load_checkpoint(tmp_path / "saved")
            steps_of(engine, 0)  # nothing was changed


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    with training(tmp_path / "drive", {}) as engine:
        steps_of(engine, 0)
        engine.save_checkpoint(tmp_path / "saved")
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}
    with (
        training(tmp_path / "drive", sgd) as engine,
        pytest.raises(CheckpointError, match=r"another kind of optimizer saved it\. Load another checkpoint"),
    ):
        engine.load_checkpoint(tmp_path / "saved")


@pytest.mark.deep
def test_a_parameter_that_the_checkpoint_does_not_train_starts_anew_only_if_asked(tmp_path: Path) -> None:
    with _in_groups(tmp_path / "drive", "fewer") as engine:
        steps_of(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved")
        expected = {name: state_of(engine, p) for name, p in engine.module.named_parameters() if p.requires_grad}
    with _in_groups(tmp_path / "drive", "") as engine:
        with pytest.raises(ValueError, match=r"'norm.weight' is in none .*, and in group 0.*load_module_strict=False"):
            engine.load_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        for name, parameter in engine.module.named_parameters():
            if "exp_avg" in expected.get(name, ()):
                assert torch.equal(state_of(engine, parameter)["exp_avg"], expected[name]["exp_avg"])
        assert not state_of(engine, engine.module.norm.weight).get("step")


def test_a_durable_run_with_parameters_in_other_groups_is_refused(tmp_path: Path) -> None:
    changes = {"infinity": {"durable": True, "durable_path": str(tmp_path / "run")}}
    with _in_groups(tmp_path / "drive", "", changes) as engine:
        steps_of(engine, 0)
    refused = pytest.raises(ModelError, match=r"'late.weight' is not in group 0 of its optimizer")
    with refused, _in_groups(tmp_path / "drive", "other groups", changes):
        pass
    with _in_groups(tmp_path / "drive", "other parameters", changes) as engine:
        assert engine.global_steps == 1


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, {**BF16, **IN_MEMORY}], ids=["on nvme", "in memory"])
@pytest.mark.parametrize("blocking", [True, False])
def test_what_is_frozen_is_left_out_if_asked_and_stays_as_it_is(
    changes: dict[str, Any], blocking: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with training(tmp_path / "drive", changes) as engine:
        steps_of(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True, blocking=blocking)
        losses = steps_of(engine, 2, 3)
        expected = everything(engine)
    found = saved_files.Checkpoint.open(tmp_path / "saved")
    assert found.omitted.excluded == ["number", "frozen.weight", "frozen.bias"]
    assert not set(found.omitted.excluded) & found.of("parameters").keys()
    with training(tmp_path / "drive", changes) as engine:  # with the same base
        engine.load_checkpoint(tmp_path / "saved")
        assert steps_of(engine, 2, 3) == losses
        require_equal(everything(engine), expected)
    with training(tmp_path / "drive", changes) as engine:  # with another one
        with torch.no_grad():
            engine.module.frozen.weight[0, 0] += 1
        before = everything(engine)
        with pytest.raises(ModelError, match=r"have other values now: 'frozen\.weight'\. Load the weights"):
            engine.load_checkpoint(tmp_path / "saved")
        require_equal(everything(engine), before)
        assert engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)[0] is not None
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 1
    assert re.search(r"without 'number' and 2 others.*engine\.save_pretrained", capsys.readouterr().err, re.DOTALL)
    model = Model()
    model.frozen.requires_grad_(True)
    missing = pytest.raises(ModelError, match=r"'frozen.weight' is missing; 'frozen.bias' is missing")
    with (
        engine_on_nvme(
            tmp_path / "drive", model, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **changes}
        ) as engine,
        missing,
    ):
        engine.load_checkpoint(tmp_path / "saved")


@pytest.mark.deep
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with training(tmp_path / "one", {}) as saving, training(tmp_path / "two", {}, seed=1) as loading:
        steps_of(saving, 0)
        saving.save_checkpoint(tmp_path / "saved", tag="same", client_state={"number": 1})
        buffers, replaced = checkpoint_loading.Loading.buffers, []

        def replace(self: Any, *args: Any) -> None:
            if not replaced:
                replaced.append(True)
                steps_of(saving, 1)
                saving.save_checkpoint(tmp_path / "saved", tag="same", client_state={"number": 2})
            buffers(self, *args)

        monkeypatch.setattr(checkpoint_loading.Loading, "buffers", replace)
        assert loading.load_checkpoint(tmp_path / "saved")[1] == {"number": 2}
        assert "was replaced by another process" in caplog.text
        require_equal(everything(loading), everything(saving))
        assert steps_of(loading, 2, 3) == steps_of(saving, 2, 3)


@pytest.mark.deep
def test_the_loss_scale_goes_with_the_optimizer(tmp_path: Path) -> None:
    fp16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}}
    with training(tmp_path / "drive", fp16) as engine:
        steps_of(engine, 0)
        steps_of(engine, 1)
        assert engine.loss_scale() == 32
        engine.save_checkpoint(tmp_path / "saved")
    with training(tmp_path / "drive", fp16, seed=1) as engine:
        engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
        assert (engine.loss_scale(), engine.global_steps) == (16, 2)
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.loss_scale() == 32
