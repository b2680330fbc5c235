"""The ways in which scripts for DeepSpeed call an engine, compared with the loop in plain torch that they mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.deepspeed import initialize
from infinity.errors import ConfigError, StepError
from tests.exactness import lockstep
from tests.exactness.case import loss_of
from tests.exactness.lockstep import BF16, PLAIN, Lockstep, everything_on_nvme, make_batch
from tests.exactness.reference import PlainTorch
from tests.twins import Twins

_RESIDENT = {"zero_optimization": {"stage": 2, "offload_param": None, "offload_optimizer": None}}
_MODES: dict[str, dict[str, Any]] = {
    "in_backward": {},
    "in_backward_bf16": BF16,
    "deferred": {"gradient_clipping": 0.1},
    "deferred_bf16": {"gradient_clipping": 0.1, **BF16},
    "step": {"infinity": {"update": "step"}},
    "resident": _RESIDENT,
    "resident_clipped": {**_RESIDENT, "gradient_clipping": 0.1},
}
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}


def _config(mode: str, **more: Any) -> dict[str, Any]:
    return {**_MODES[mode], **more}


def _start(directory: Path, mode: str, **more: Any) -> Lockstep:
    return Lockstep.start(directory, initialize=initialize, changes=_config(mode, **more))


def _micro_batch(both: Lockstep, step: int, index: int, backward: Callable[[torch.Tensor], Any], *, calls: str) -> None:
    """One micro-batch of both; ``backward`` is the engine's side."""
    batch = both.batch(step, index)
    expected = both.reference.forward(batch)
    both.reference.backward(expected)
    loss = loss_of((both.engine if calls == "engine" else both.model)(**batch))
    backward(loss)
    both.note(f"loss {step}.{index}", expected, loss)


def _end(both: Lockstep, step: int) -> None:
    norm = both.reference.step()
    both.note(f"norm {step}", norm, torch.tensor(both.engine.get_global_grad_norm()))


@pytest.mark.deep
@pytest.mark.parametrize("calls", ["engine", "model"])
@pytest.mark.parametrize("mode", _MODES)
def test_own_backward_with_the_engines_step_is_divided(mode: str, calls: str, tmp_path: Path) -> None:
    with _start(tmp_path, mode, gradient_accumulation_steps=4) as both:
        for step in range(3):
            for index in range(4):
                _micro_batch(both, step, index, lambda loss: loss.backward(), calls=calls)
                both.engine.step()
            _end(both, step)
        assert both.engine.global_steps == 3
        both.require_equal()


@pytest.mark.deep
def test_fp16_with_a_scaled_loss_and_an_own_backward(tmp_path: Path) -> None:
    # What plain torch halves before backward is halved afterwards here: the same, unless a gradient is below fp16's normal ones.
    scaling = {"fp16": {**_FP16["fp16"], "initial_scale_power": 11}}
    with Lockstep.start(tmp_path, initialize=initialize, changes={**scaling, "gradient_accumulation_steps": 2}) as both:
        for step in range(4):
            for index in range(2):
                _micro_batch(both, step, index, lambda loss: both.engine.scale(loss).backward(), calls="engine")
                both.engine.step()
            _end(both, step)
        with pytest.raises(StepError, match=r"engine.scale\(loss\).backward\(\)"):
            loss_of(both.engine(**both.batch(9))).backward()
        both.engine.reset()
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("mode", _MODES)
def test_backwards_whose_gradients_are_averaged_once_are_one_step(mode: str, tmp_path: Path) -> None:
    """The first steps show one backward each, so that updates have begun in backward where they may."""
    with _start(tmp_path, mode) as both:
        for step, num_backwards in enumerate((1, 1, 3, 1)):
            with both.engine.coalesce_grad_reduction():
                for index in range(num_backwards):
                    _micro_batch(both, step, index, both.engine.backward, calls="engine")
                with pytest.raises(StepError, match="nested"), both.engine.coalesce_grad_reduction():
                    pass
            both.engine.step()
            _end(both, step)
        for index in range(2):
            with both.engine.no_sync() if index == 0 else contextlib.nullcontext():
                _micro_batch(both, 4, index, both.engine.backward, calls="engine")
        both.engine.step()
        _end(both, 4)
        both.require_equal()


def test_gradients_are_averaged_once_only_with_zero_and_counted_micro_batches() -> None:
    config: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = initialize(model=nn.Linear(2, 2), config={**config, "zero_optimization": {"stage": 0}})
    with engine, pytest.raises(NotImplementedError, match="stage 0"), engine.coalesce_grad_reduction():
        pass
    engine, *_ = initialize(
        model=nn.Linear(2, 2),
        config={**config, "zero_optimization": {"stage": 1}, "managed_gradient_accumulation": False},
    )
    with engine:
        with pytest.raises(StepError, match="managed_gradient_accumulation"), engine.coalesce_grad_reduction():
            pass
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
        assert engine.global_samples == 6  # of three backwards


@pytest.mark.deep
@pytest.mark.parametrize("mode", _MODES)
def test_the_boundary_is_set_by_hand(mode: str, tmp_path: Path) -> None:
    """One ``engine.step`` per step, as Accelerate does it; the loss is divided by whoever sets the boundary."""
    with _start(tmp_path, mode) as both:
        both.reference.num_micro_batches = 2
        for step in range(3):
            for index in range(2):
                both.engine.set_gradient_accumulation_boundary(index == 1)
                assert both.engine.is_gradient_accumulation_boundary() is (index == 1)
                _micro_batch(
                    both, step, index, lambda loss: both.engine.backward(loss / 2, scale_wrt_gas=False), calls="engine"
                )
            both.engine.step()
            _end(both, step)
        assert both.engine.global_steps == 3
        both.require_equal()


def test_backward_returns_the_loss_as_it_was_divided(tmp_path: Path) -> None:
    with _start(tmp_path, "deferred", gradient_accumulation_steps=2) as both:
        loss = loss_of(both.engine(**both.batch(0)))
        assert torch.equal(both.engine.backward(loss), loss.detach() / 2)
        both.engine.step()


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["in_backward", "deferred_bf16", "resident"])
def test_every_step_is_an_update_if_the_config_says_so(mode: str, tmp_path: Path) -> None:
    more = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    with _start(tmp_path, mode, **more) as both:
        for step, num_micro_batches in enumerate((2, 1, 3)):
            for index in range(num_micro_batches):
                _micro_batch(both, step, index, both.engine.backward, calls="engine")
                assert not both.engine.is_gradient_accumulation_boundary()
            both.engine.step()
            _end(both, step)
        assert both.engine.global_steps == 3
        assert both.engine.config.infinity.update != "in_backward"
        with pytest.raises(StepError, match=r"every engine\.step"):
            both.engine.set_gradient_accumulation_boundary(True)
        both.require_equal()


def test_unmanaged_accumulation_cannot_update_in_backward(tmp_path: Path) -> None:
    changes = {"managed_gradient_accumulation": False, "infinity": {"update": "in_backward"}}
    with pytest.raises(ConfigError, match="managed_gradient_accumulation"):
        initialize(model=PLAIN.make("none"), config=everything_on_nvme(tmp_path, changes))


@pytest.mark.deep
@pytest.mark.parametrize("calls", ["engine.backward", "engine.train_batch"])
def test_the_batch_size_changes_between_steps(calls: str, tmp_path: Path) -> None:
    with _start(tmp_path, "in_backward", train_micro_batch_size_per_gpu=2) as both:
        for step, num in enumerate((1, 2, 4, 2)):
            both.engine.set_train_batch_size(2 * num)
            assert both.engine.get_batch_info() == (2 * num, 2, num)
            both.reference.num_micro_batches = num
            if calls == "engine.backward":
                both.engine_step(step)
            else:
                both.batch_step(step)
        assert (both.engine.global_samples, both.engine.micro_steps) == (2 * (1 + 2 + 4 + 2), 1 + 2 + 4 + 2)
        both.require_equal()
        with pytest.raises(ConfigError, match="multiple"):
            both.engine.set_train_batch_size(3)


def test_the_batch_size_does_not_change_within_a_step(tmp_path: Path) -> None:
    with _start(tmp_path, "in_backward", gradient_accumulation_steps=2) as both:
        both.engine.backward(loss_of(both.engine(**both.batch(0))))
        both.engine.step()
        with pytest.raises(StepError, match=r"after the engine\.step"):
            both.engine.set_gradient_accumulation_steps(3)


def test_no_sync_allows_all_but_a_step(tmp_path: Path) -> None:
    with _start(tmp_path, "in_backward") as both:
        with both.engine.no_sync():
            _micro_batch(both, 0, 0, both.engine.backward, calls="engine")
            with pytest.raises(StepError, match="no_sync"):
                both.engine.step()
            with pytest.raises(StepError, match="reentry"), both.engine.no_sync():
                pass
            with pytest.raises(StepError, match="no_sync"):  # it is the outer block still
                both.engine.step()
        both.engine.step()
        _end(both, 0)
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("calls", ["loss.backward", "generator", "discriminator"])
def test_one_backward_through_two_engines_is_divided_once(calls: str, tmp_path: Path) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    generator, discriminator = (
        Twins(tmp_path, net, sgd, initialize=initialize, gradient_accumulation_steps=2)
        for net in (nn.Linear(3, 4), nn.Linear(4, 1))
    )
    backward: dict[str, Callable[[torch.Tensor], Any]] = {
        "loss.backward": torch.Tensor.backward,
        "generator": generator.engine.backward,
        "discriminator": discriminator.engine.backward,
    }
    with generator, discriminator:
        for step in range(3):
            for index in range(2):
                noise = torch.full((5, 3), float(step + index))
                backward[calls](discriminator.engine(generator.engine(noise)).pow(2).mean())
                (discriminator.plain(generator.plain(noise)).pow(2).mean() / 2).backward()
                for each in (generator, discriminator):
                    each.engine.step()
            for each in (generator, discriminator):
                each.expected.step()
                each.expected.zero_grad()
        generator.require_equal()
        discriminator.require_equal()


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("mode", ["in_backward", "in_backward_bf16", "resident"])
def test_an_engine_without_an_optimizer_evaluates(mode: str, is_frozen: bool, tmp_path: Path) -> None:
    """As TRL makes of its reference models; and of a model in which nothing is trained."""
    _evaluates(tmp_path, {**_MODES[mode], "optimizer": None}, requires_grad=not is_frozen)


def _evaluates(directory: Path, changes: dict[str, Any], *, requires_grad: bool) -> None:
    model = PLAIN.make("none").requires_grad_(requires_grad)
    dtype = torch.bfloat16 if "bf16" in changes else torch.float32
    twin = PLAIN.make("none").requires_grad_(requires_grad).to(dtype)
    engine, optimizer, loader, scheduler = initialize(model=model, config=everything_on_nvme(directory, changes))
    with engine:
        assert (optimizer, loader, scheduler, engine.optimizer) == (None, None, None, None)
        engine.eval()
        twin.eval()
        for step in range(2):
            batch = make_batch(step, dtype=dtype)
            with torch.no_grad():
                assert torch.equal(loss_of(engine(**batch)), loss_of(twin(**batch)))
        assert engine.get_lr() == []
        if requires_grad:  # gradients are torch's own business then
            loss = loss_of(engine(**batch))
            loss.backward()
            loss_of(twin(**batch)).backward()
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)
            engine.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        for call in (lambda: engine.backward(torch.ones(1, requires_grad=True)), engine.step):
            with pytest.raises(StepError, match="no optimizer"):
                call()


def test_arguments_for_the_schedule(tmp_path: Path) -> None:
    changes = _config("deferred")
    arguments = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)}
    with Lockstep.start(tmp_path, initialize=initialize, changes=changes, arguments=lambda _: arguments) as both:
        first = both.engine.get_lr()
        for metrics in (1.0, None, 2.0):
            both.engine.backward(loss_of(both.engine(**both.batch(0))))
            both.engine.step(lr_kwargs=None if metrics is None else {"metrics": metrics})
        assert both.engine.get_lr() == [first[0] * 0.1]


def test_answers_of_the_engine(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    with _start(tmp_path, "deferred", scheduler=scheduler, train_micro_batch_size_per_gpu=3) as both:
        engine = both.engine
        assert (engine.local_rank, engine.global_rank, engine.world_size, engine.zero_optimization()) == (0, 0, 1, True)
        assert not (engine.fp16_enabled() or engine.bfloat16_enabled() or engine.dynamic_loss_scale())
        assert (engine.gradient_clipping(), engine.scheduler_name(), engine.get_mom()) == (
            0.1,
            "WarmupLR",
            [(0.9, 0.95)],
        )
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5] == [group["lr"] for group in both.optimizer.param_groups]
        engine.backward(loss_of(engine(**both.batch(0))))
        engine.step()
        assert (both.scheduler.last_epoch, engine.global_samples, engine.micro_steps) == (1, 3, 1)
        engine.destroy()
        engine.destroy()


class _Autocast(PlainTorch):
    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(self.model(**batch))


@pytest.mark.deep
@pytest.mark.parametrize("calls", ["engine.backward", "engine.train_batch"])
@pytest.mark.parametrize("more", [{}, {"gradient_clipping": 0.1}, {"infinity": {"schedule": "vertical"}}])
def test_autocast_by_the_config(
    more: dict[str, Any], calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "PlainTorch", _Autocast)
    changes = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "gradient_accumulation_steps": 2, **more}
    with Lockstep.start(tmp_path, initialize=initialize, changes=changes) as both:
        assert (both.engine.torch_autocast_enabled(), both.engine.torch_autocast_dtype()) == (True, torch.bfloat16)
        for step in range(3):
            (both.engine_step if calls == "engine.backward" else both.batch_step)(step)
        both.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["ordinary", "vertical"])
def test_autocast_around_weights_of_the_same_dtype(schedule: str, name: str, tmp_path: Path) -> None:
    """What autocast computes in fp32, layer norm among it, is computed in fp32 all the same."""
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    changes = {"torch_autocast": {"enabled": True, "dtype": name}, "gradient_accumulation_steps": 2}
    changes |= {"infinity": {"schedule": schedule}, **(BF16 if name == "bf16" else _FP16)}
    with Lockstep.start(tmp_path, initialize=initialize, changes=changes) as both:
        call = both.reference.model.forward
        both.reference.model.forward = torch.autocast("cpu", dtype)(call)
        for step in range(3):
            both.batch_step(step)
        both.require_equal()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16": {"enabled": True}}, "torch_autocast.dtype.*fp16"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}, "infinity": {"update": "in_backward"}}, "fp16"),
    ],
)
def test_autocast_that_does_not_fit_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = everything_on_nvme(tmp_path, {"torch_autocast": {"enabled": True}, **changes})
    with pytest.raises(ConfigError, match=words):
        initialize(model=PLAIN.make("none"), config=config)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_inputs_are_cast_if_the_config_says_so(name: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    config = everything_on_nvme(tmp_path, {name: {"enabled": True, "auto_cast": True}})
    with initialize(model=model, config=config)[0] as engine:
        x = torch.ones(3, 4)
        for out in (engine(x), engine(input=x)):
            assert out.dtype == engine.config.compute_dtype
        loss = out.float().sum()
        engine.backward(loss)
        engine.step()


def test_keys_with_dots_are_those_of_their_block(tmp_path: Path) -> None:
    """As TRL writes them."""
    config = everything_on_nvme(tmp_path, {"zero_optimization.reduce_bucket_size": 100, "zero_optimization.stage": 2})
    with initialize(model=PLAIN.make("none"), config=config)[0] as engine:
        assert engine.zero_optimization_stage() == 2
        assert engine.config.offload_param.device == "nvme"
        assert any("zero_optimization.stage" in notice for notice in engine.config.notices)
    config["zero_optimisation.stage"] = 2
    with pytest.raises(ConfigError, match="zero_optimization"):
        initialize(model=PLAIN.make("none"), config=config)


@pytest.fixture
def defaults_put_back() -> Iterator[None]:
    yield
    _set_defaults("fp32")


def _set_defaults(name: str) -> None:
    torch.set_default_dtype({"bf16": torch.bfloat16, "fp64": torch.float64}.get(name, torch.float32))
    torch.set_default_device("meta" if name == "meta" else None)


@pytest.mark.deep
@pytest.mark.usefixtures("defaults_put_back")
@pytest.mark.parametrize("default", ["bf16", "fp64", "meta"])
@pytest.mark.parametrize("changes", [{**BF16, "infinity": {"state_dtype": "int8"}}, _FP16, {"gradient_clipping": 0.1}])
def test_the_users_default_dtype_and_device_change_nothing(
    changes: dict[str, Any], default: str, tmp_path: Path
) -> None:
    """Set before ``initialize`` and while training; the reference has torch's own."""
    model = PLAIN.make("none")
    with Lockstep.start(tmp_path, initialize=initialize, changes=changes) as both:
        both.engine.close()
        _set_defaults(default)
        both.model = model
        both.engine, both.optimizer, *_ = initialize(model=model, config=everything_on_nvme(tmp_path, changes))
        for step in range(3):
            _set_defaults("fp32")
            batch = both.batch(step)
            both.reference.backward(both.reference.forward(batch))
            _set_defaults(default)
            both.engine.backward(loss_of(both.engine(**batch)))
            both.engine.step()
            both.engine.state_dict()
            _set_defaults("fp32")
            _end(both, step)
        both.require_equal()


def test_zero_grad_between_micro_batches_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _start(tmp_path, "step", gradient_accumulation_steps=2) as both:
        for index in (0, 1, 0):
            both.engine.backward(loss_of(both.engine(**both.batch(0, index))))
            both.engine.step()
        assert "drops the gradients" not in caplog.text
        both.engine.zero_grad()
    assert "drops the gradients of those so far (1), and the step divides by all 2" in caplog.text


@pytest.mark.parametrize("boundary", ["by_hand", "every_step"])
def test_a_script_that_ends_only_steps_is_not_warned(
    boundary: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One ``engine.step`` for two backwards, and ``zero_grad`` and a checkpoint after it, as in the Trainer."""
    more = {"managed_gradient_accumulation": False} if boundary == "every_step" else {}
    with _start(tmp_path, "step", gradient_accumulation_steps=2, **more) as both:

        def accumulate(index: int) -> None:
            if boundary == "by_hand":
                both.engine.set_gradient_accumulation_boundary(index == 1)
            both.engine.backward(loss_of(both.engine(**both.batch(0, index))))

        for _ in range(2):
            for index in range(2):
                accumulate(index)
            both.engine.step()
            both.engine.zero_grad()
            both.engine.save_checkpoint(str(tmp_path / "checkpoints"))
        assert "the gradients" not in caplog.text
        accumulate(0)
        both.engine.save_checkpoint(str(tmp_path / "checkpoints"))
        assert "between the micro-batches of a step: the gradients so far are not saved" in caplog.text
        both.engine.zero_grad()
        told = "drops the gradients of those so far (1), and the step divides by all 2" in caplog.text
        assert told is (boundary == "by_hand")


def test_train_batch_trains_in_training_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0))
    with initialize(model=model, config=everything_on_nvme(tmp_path))[0] as engine:
        engine.eval()
        assert engine.train_batch(iter([torch.ones(1, 8)]), lambda output, _: output.sum()).item() == 0
        assert (
            model.training and engine.eval_batch(torch.ones(1, 8), loss_fn=lambda output, _: output.sum()).item() != 0
        )
