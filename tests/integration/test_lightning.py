"""Lightning with `InfinityStrategy` gives the bits of Lightning without it, in both of its packages."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import signal
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ConfigError, ModelError, StepError, StorageError
from tests.twins import on_nvme

_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
_FOUND = [name for name in _PACKAGES if importlib.util.find_spec(name) is not None]
if not _FOUND:
    pytest.skip("neither lightning nor pytorch_lightning is installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises on loaders, loggers and directories


def module_for(
    pytorch: Any,
    *,
    is_manual: bool = False,
    own_backward: bool = False,
    has_inputs: bool = False,
    skips: Collection[int] = (),
) -> Any:
    """Two layers in `configure_model`, one made before, and a raw parameter that `training_step` uses."""

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(8, 16)
            self.factor = nn.Parameter(torch.full((16,), 0.5))
            self.rest: Any = None
            self.losses: list[float] = []
            self.automatic_optimization = not is_manual

        def configure_model(self) -> None:
            if self.rest is None:
                torch.manual_seed(1)
                self.rest = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))

        def _loss(self, batch: Any) -> torch.Tensor:
            return self.rest(torch.tanh(self.first(batch)) * self.factor).square().mean()

        def training_step(self, batch: Any, index: int) -> Any:
            if index in skips:
                return None
            loss = self._loss(batch)
            self.losses.append(loss.item())
            self.log("loss", loss)
            if not is_manual:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss / 2, retain_graph=has_inputs)
            if has_inputs:
                self.manual_backward(loss, inputs=list(self.first.parameters()))
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()
            return None

        if own_backward:

            def backward(self, loss: torch.Tensor) -> None:
                (2 * loss).backward()

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validated", self._loss(batch))

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module()


def data(num: int = 8) -> Any:
    values = torch.randn(4 * num, 8, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(list(values), batch_size=4)


def trainer_for(pytorch: Any, directory: Path, strategy: Any = "auto", **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    given: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    return pytorch.Trainer(default_root_dir=directory, accelerator="cpu", devices=1, strategy=strategy, **given)


@pytest.fixture(params=_FOUND)
def package(request: pytest.FixtureRequest) -> str:
    return request.param


def parts(package: str) -> tuple[Any, Any]:
    """The package, and the strategy for it."""
    module = importlib.import_module(f"infinity.integrations.{package}")
    return importlib.import_module(_PACKAGES[package]), module.InfinityStrategy


def assert_same(first: Any, second: Any) -> None:
    assert first.losses == second.losses
    assert_same_weights(first, second)


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    expected = first.state_dict()
    assert expected.keys() == second.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in second.state_dict().items())


def of_both(package: str, directory: Path, run: Callable[[Any, Any], Any], **config: Any) -> list[Any]:
    """What ``run`` gives with the package and Lightning's own strategy, and with ours."""
    pytorch, strategy = parts(package)
    found = []
    for kind in ("auto", strategy(config=on_nvme(directory / "nvme", **config))):
        pytorch.seed_everything(3)
        found.append(run(pytorch, kind))
    return found


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated", "autocast"],
)
def test_fit(options: dict[str, Any], package: str, tmp_path: Path) -> None:
    """Automatic optimization, validation, and the weights in the module afterwards."""

    def run(pytorch: Any, kind: Any) -> tuple[Any, Any, int]:
        module, trainer = module_for(pytorch), trainer_for(pytorch, tmp_path, kind, **options)
        trainer.fit(module, data(), data(2))
        return module, trainer.callback_metrics, trainer.global_step

    plain, ours = of_both(package, tmp_path, run)
    assert_same(plain[0], ours[0])
    assert plain[1:] == ours[1:]
    assert not list((tmp_path / "nvme").iterdir())


@pytest.mark.deep
@pytest.mark.parametrize("what", ["unfrozen", "averaged", "larger"])
def test_what_changes_and_is_resumed(what: str, package: str, tmp_path: Path) -> None:
    """Layers that were unfrozen before the kill, averaging that has begun, layers that a checkpoint makes larger."""
    pytorch, kind = parts(package)
    callbacks = importlib.import_module(f"{_PACKAGES[package]}.callbacks")

    class Unfreezing(callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.first)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.first, optimizer)

    class Module(pytorch.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self._make(width)

        def _make(self, width: int) -> None:
            torch.manual_seed(0)
            self.first = nn.Sequential(nn.Linear(8, width), nn.Tanh())
            self.head = nn.Linear(width, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.head(self.first(batch)).square().mean()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["width"] = self.head.in_features

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if checkpoint["width"] != self.head.in_features:
                self._make(checkpoint["width"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
            if what == "unfrozen":
                return optimizer
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def run(name: str, epochs: int, width: int = 16, resumes: str | None = None) -> Any:
        module = Module(width)
        saver = callbacks.ModelCheckpoint(tmp_path / name, save_last=True, every_n_epochs=1)
        strategy = kind(config=on_nvme(tmp_path / "nvme")) if name == "ours" else "auto"
        given = [saver] + ([Unfreezing()] if what == "unfrozen" else [])
        if what == "averaged":
            given.append(callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1))
        options = {"enable_checkpointing": True, "callbacks": given, "max_epochs": epochs}
        trainer_for(pytorch, tmp_path, strategy, **options).fit(
            module, data(), ckpt_path=resumes, **({"weights_only": False} if resumes and can_say else {})
        )
        return module, saver.last_model_path

    can_say, found = "weights_only" in inspect.signature(pytorch.Trainer.fit).parameters, []
    for name in ("plain", "ours"):
        _, path = run(name, 3, 24 if what == "larger" else 16)
        found.append(run(name, 5, resumes=path)[0])
    assert_same_weights(*found)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("how", [{"is_manual": True}, {"is_manual": True, "has_inputs": True}, {"own_backward": True}])
def test_manual_optimization_and_own_backward(how: dict[str, bool], package: str, tmp_path: Path) -> None:
    def run(pytorch: Any, kind: Any) -> Any:
        module = module_for(pytorch, **how)
        trainer_for(pytorch, tmp_path, kind).fit(module, data())
        return module

    assert_same(*of_both(package, tmp_path, run))


def fitted(package: str, directory: Path, *, is_ours: bool, resumes: str | None = None) -> Any:
    """A run with checkpoints; the module, the callback, what was monitored."""
    pytorch, strategy = parts(package)
    saver = pytorch.callbacks.ModelCheckpoint(
        directory / "checkpoints", save_last=True, every_n_train_steps=4, save_top_k=2, monitor="loss"
    )
    monitor = pytorch.callbacks.LearningRateMonitor()
    pytorch.seed_everything(3)
    module = module_for(pytorch)
    trainer = trainer_for(
        pytorch,
        directory,
        strategy(config=on_nvme(directory / "nvme")) if is_ours else "auto",
        callbacks=[saver, monitor],
        enable_checkpointing=True,
        logger=pytorch.loggers.CSVLogger(str(directory)),
        log_every_n_steps=1,
    )
    trainer.fit(module, data(), ckpt_path=resumes)
    return module, saver, trainer, (Path(trainer.logger.log_dir) / "metrics.csv").read_text()


@pytest.mark.deep
def test_checkpoints_callbacks_and_resuming(package: str, tmp_path: Path) -> None:
    plain, ours = (tmp_path / name for name in ("plain", "ours"))
    expected, expected_saver, _, log = fitted(package, plain, is_ours=False)
    module, saver, trainer, found_log = fitted(package, ours, is_ours=True)
    assert_same(expected, module)
    assert found_log == log
    names = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (plain, ours)]
    assert names[0] == names[1]
    assert Path(saver.best_model_path).name == Path(expected_saver.best_model_path).name
    assert Path(saver.last_model_path).is_dir()
    [found] = trainer.test(module, data(2), ckpt_path="best", verbose=False)
    pytorch, _ = parts(package)
    [wanted] = trainer_for(pytorch, tmp_path).test(
        module_for(pytorch), data(2), ckpt_path=expected_saver.best_model_path, verbose=False
    )
    assert found == wanted
    # what Lightning alone has saved goes on here as there
    [older] = [path for path in (plain / "checkpoints").glob("*step=*.ckpt") if "step=12" in path.name][:1] or [None]
    if older is not None:
        again, *_ = fitted(package, tmp_path / "a", is_ours=False, resumes=str(older))
        here, *_ = fitted(package, tmp_path / "b", is_ours=True, resumes=str(older))
        assert_same(again, here)


@pytest.mark.deep(but=1)
def test_a_checkpoint_after_fit(package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The states are gone: it has weights, and a training that would begin anew in silence is refused."""
    pytorch, strategy = parts(package)
    trainer = trainer_for(pytorch, tmp_path, strategy(config=on_nvme(tmp_path / "nvme")), max_epochs=1)
    module, path = module_for(pytorch), tmp_path / "end.ckpt"
    trainer.fit(module, data())
    trainer.save_checkpoint(path)
    assert "'" + str(path) + "' has weights only" in caplog.text and "ModelCheckpoint(save_last=True)" in caplog.text
    [expected] = trainer.test(module, data(2), verbose=False)
    [found] = trainer.test(module_for(pytorch), data(2), ckpt_path=path, verbose=False)
    assert found == expected
    for kind in ("auto", strategy(config=on_nvme(tmp_path / "nvme"))):
        with pytest.raises(KeyError, match="contains only the model"):
            trainer_for(pytorch, tmp_path, kind).fit(module_for(pytorch), data(), ckpt_path=path)


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("what", ["fp32", "durable", "fp16"])
@pytest.mark.parametrize("skips", [(2, 5), (4, 5)], ids=["micro-batches", "a step"])
def test_batches_are_skipped(what: str, skips: Collection[int], tmp_path: Path) -> None:
    """`training_step` returns None: of the second and third step one micro-batch, or both of the third."""
    config = on_nvme(tmp_path / "nvme")
    config["infinity"] |= {"durable": what == "durable"}
    if what == "fp16":
        config |= {"fp16": {"enabled": True, "initial_scale_power": 4}}

    def run(pytorch: Any, kind: Any) -> Any:
        module = module_for(pytorch, skips=skips)
        trainer_for(pytorch, tmp_path, kind, max_epochs=1, accumulate_grad_batches=2).fit(module, data())
        return module

    trained = of_both(_FOUND[0], tmp_path, run, **config)
    if what == "fp16":
        assert len(trained[1].losses) == 6 and trained[1].losses[-1] < trained[1].losses[0]
    else:
        assert_same(*trained)


@pytest.mark.deep
def test_a_durable_run_and_lightnings_steps(tmp_path: Path) -> None:
    """It goes on with a checkpoint of Lightning's, and not beside its count; who only evaluates has none."""
    pytorch, strategy = parts(_FOUND[0])
    config = on_nvme(tmp_path / "nvme")
    config["infinity"]["durable"] = True
    saver = pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True)
    trainer = trainer_for(
        pytorch, tmp_path, strategy(config=config), max_epochs=1, enable_checkpointing=True, callbacks=[saver]
    )
    module = module_for(pytorch)
    trainer.fit(module, data())
    trainer.test(module, data(2), verbose=False)
    with pytest.raises(StepError, match=r"is at step 8 already.*Pass ckpt_path=.*durable_path"):
        trainer_for(pytorch, tmp_path, strategy(config=config)).fit(module_for(pytorch), data())
    again = module_for(pytorch)
    trainer_for(pytorch, tmp_path, strategy(config=config)).fit(again, data(), ckpt_path=saver.last_model_path)
    assert len(again.losses) == 8


@pytest.mark.deep
@pytest.mark.parametrize("where", ["on_before_optimizer_step", "backward"])
def test_a_checkpoint_on_an_exception(where: str, package: str, tmp_path: Path) -> None:
    """What Lightning's callback is for: the weights of the last step, from which a training goes on."""
    pytorch, strategy = parts(package)
    callbacks = importlib.import_module(f"{_PACKAGES[package]}.callbacks")

    class Failing(pytorch.Callback):  # type: ignore[misc, name-defined]
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5 and where != "backward":
                raise ZeroDivisionError

        def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
            if trainer.global_step == 5 and where == "backward":
                module.factor.register_hook(self.fail)

        def fail(self, gradient: torch.Tensor) -> None:
            raise ZeroDivisionError

    class Keeping(callbacks.OnExceptionCheckpoint):  # type: ignore[misc, name-defined]
        def teardown(self, *_: Any) -> None:
            """Lightning's would remove what was written."""

    def run(pytorch: Any, kind: Any) -> Any:
        saver = Keeping(tmp_path / ("plain" if kind == "auto" else "ours"))
        with pytest.raises(ZeroDivisionError):
            options = {"callbacks": [Failing(), saver], "enable_checkpointing": True}
            trainer_for(pytorch, tmp_path, kind, **options).fit(module_for(pytorch), data())
        module = module_for(pytorch)
        pytorch.seed_everything(4)
        again = kind if kind == "auto" else strategy(config=on_nvme(tmp_path / "nvme"))
        trainer_for(pytorch, tmp_path, again).fit(module, data(), ckpt_path=saver.ckpt_path)
        return module

    found = of_both(package, tmp_path, run)
    assert found[0].losses
    assert_same(*found)


def test_what_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytorch, strategy = parts(_FOUND[0])
    config = on_nvme(tmp_path / "nvme")

    def fit(changes: dict[str, Any], module: Any = None, **options: Any) -> None:
        trainer = trainer_for(pytorch, tmp_path, strategy(config={**config, **changes}), **options)
        trainer.fit(module or module_for(pytorch), data())

    by_value = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
    changes: dict[str, Any]
    for message, changes, options in (
        ("accumulate_grad_batches 2", {"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2}),
        ("'gradient_accumulation_steps' is 4 and accumulate_grad_batches 1", {"gradient_accumulation_steps": 4}, {}),
        (r"'gradient_clipping' is 0\.5 and clipping by norm", {"gradient_clipping": 0.5}, by_value),
        (r"gradient_clip_val 0\.5", {"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}),
        (r"bf16-true.*InfinityStrategy\(config=", {}, {"precision": "bf16-true"}),
        (r"names the optimizer AdamW.*Take 'optimizer' out of the config", {"optimizer": {"type": "AdamW"}}, {}),
        (r"names the scheduler WarmupLR.*Take 'scheduler' out", {"scheduler": {"type": "WarmupLR"}}, {}),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(changes, **options)
    with pytest.raises(ConfigError, match="64-true"):
        trainer_for(pytorch, tmp_path, "infinity_stage_3", precision="64-true").fit(module_for(pytorch), data())
    (tmp_path / "saved.ckpt").mkdir()
    (tmp_path / "saved.ckpt" / "file").write_text("mine")
    saver = pytorch.Callback()
    saver.on_train_batch_end = lambda trainer, *_: trainer.save_checkpoint(tmp_path / "saved.ckpt")
    with pytest.raises(StorageError, match="is not a checkpoint, and is not replaced"):
        fit({}, callbacks=[saver])
    assert (tmp_path / "saved.ckpt" / "file").read_text() == "mine"
    failing, saver = pytorch.Callback(), pytorch.callbacks.OnExceptionCheckpoint(tmp_path)
    # Between updates in backward there is nothing to be saved.
    failing.on_after_backward = lambda trainer, *_: 1 / (trainer.global_step - 5)
    with pytest.raises(ZeroDivisionError):
        changes = {"infinity": {**config["infinity"], "update": "in_backward"}}
        fit(changes, callbacks=[failing, saver], enable_checkpointing=True)
    assert "on_exception.ckpt' is not saved" in caplog.text and not [*tmp_path.glob("on_exception*")]
    module = module_for(pytorch, is_manual=True)
    module.configure_optimizers = lambda: [torch.optim.SGD([each]) for each in module.parameters()]
    with pytest.raises(ModelError, match="7 optimizers"):
        fit({}, module)


@pytest.mark.deep(but=1)
def test_no_thread_of_the_engine_outlives_fit(package: str, tmp_path: Path) -> None:
    pytorch, strategy = parts(package)
    inside: list[set[threading.Thread]] = []
    module = module_for(pytorch)
    module.on_train_epoch_end = lambda: inside.append({*threading.enumerate()})
    before = {*threading.enumerate()}
    gc.disable()
    try:
        trainer_for(pytorch, tmp_path, strategy(config=on_nvme(tmp_path / "nvme"))).fit(module, data())
        assert inside[-1] - before
        assert {*threading.enumerate()} <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("step", [3, 7])
def test_slurms_signal_in_a_step_is_handled_before_the_next_batch(
    step: int, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning saves in its handler, which the engine would refuse there, and has the job run again."""
    pytorch, strategy = parts(package)
    for name in ("SLURM_NTASKS", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    calls: list[list[str]] = []
    connector = importlib.import_module(f"{_PACKAGES[package]}.trainer.connectors.signal_connector")
    monkeypatch.setattr(connector, "call", lambda command: calls.append(command) or 0)
    seen: list[int] = []

    class Signalling(pytorch.Callback):  # type: ignore[misc, name-defined]
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == step:
                signal.raise_signal(signal.SIGUSR1)
                seen.append(len(calls))

    slurm = importlib.import_module(f"{_PACKAGES[package]}.plugins.environments").SLURMEnvironment
    ours = strategy(config=on_nvme(tmp_path / "nvme"))
    options = {"plugins": [slurm(auto_requeue=True)], "callbacks": [Signalling()], "max_epochs": 1}
    trainer_for(pytorch, tmp_path, ours, **options).fit(module_for(pytorch), data())
    assert seen == [0] and calls == [["scontrol", "requeue", "1"]]
    assert [path.name for path in tmp_path.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
