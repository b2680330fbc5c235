"""Lightning's Trainer with two devices: the bits of its DDP and of the plain engine on two ranks, with each stage and offload."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process
from torch import nn

import infinity
from infinity.errors import ConfigError
from tests.integration.test_as_deepspeed import run
from tests.ranks import require_ranks

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed: pip install -c constraints.txt lightning", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises on loaders, loggers and directories
pytorch: Any = importlib.import_module("lightning.pytorch")
Strategy: Any = importlib.import_module("infinity.integrations.lightning").InfinityStrategy
_CLIP = 0.05


class Module(pytorch.LightningModule):
    """It remembers what it got, and its losses."""

    def __init__(self, *, is_manual: bool = False, clips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.got: list[torch.Tensor] = []
        self.losses: list[torch.Tensor] = []
        self.automatic_optimization = not is_manual
        self._clips = clips

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        self.got.append(batch)
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 2)
        if index % 2:
            if self._clips:
                self.clip_gradients(self.optimizers(), _CLIP, "norm")
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0, fused=True)


def _loader() -> Any:
    values = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(list(values), batch_size=2, shuffle=True)  # type: ignore[arg-type]


def _trainer(directory: Path, strategy: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    given = {"max_epochs": 1, "enable_checkpointing": False, "devices": 2, **quiet, **options}
    return pytorch.Trainer(default_root_dir=directory, accelerator="cpu", strategy=strategy, **given)


def _fit(
    directory: Path, strategy: Any, resumes: Path | None = None, *, module: Module | None = None, **options: Any
) -> Any:
    pytorch.seed_everything(3, verbose=False)
    module = module or Module()
    trainer = _trainer(directory, strategy, **options)
    trainer.fit(module, _loader(), ckpt_path=resumes)
    return module, trainer


def _require_same(module: Any, losses: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert len(module.losses) == len(losses)
    assert all(torch.equal(*pair) for pair in zip(module.losses, losses, strict=True))
    found = module.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def _require_equal_to_the_engine(config: dict[str, Any], module: Any) -> None:
    """The plain engine gets what the module got, two micro-batches a step."""
    plain = Module()
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": _CLIP}
    with infinity.initialize(model=plain, optimizer=plain.configure_optimizers(), config=config | sizes)[0] as engine:
        for batch in module.got:
            loss = plain.loss(batch)
            plain.losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
    _require_same(module, plain.losses, dict(plain.state_dict()))


def _run(function: Callable[[int], Any], directory: Path) -> None:
    """As torchrun does it."""

    def alone(rank: int) -> None:
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
        os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        function(rank)

    require_ranks(2, alone, directory)


def test_stages_and_offload(tmp_path: Path) -> None:
    """Shuffled, accumulated and clipped; each rank has data of its own, as Lightning shards it."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": _CLIP}

    def train(rank: int) -> None:
        expected, trainer = _fit(tmp_path, "ddp", **options)
        weights, metric = dict(expected.state_dict()), trainer.callback_metrics["loss"]
        assert len(expected.losses) == 8
        for stage, offload in [(0, "none"), (1, "none"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "nvme")]:
            place = {"device": offload, "nvme_path": str(tmp_path / "drive")}
            zero: dict[str, Any] = {"stage": stage} | ({"offload_optimizer": place} if offload != "none" else {})
            zero |= {"offload_param": place} if stage == 3 and offload != "none" else {}
            config = {"zero_optimization": zero}
            module, trainer = _fit(tmp_path, Strategy(config=config), **options)
            assert (trainer.world_size, trainer.global_rank) == (2, rank)
            assert torch.equal(torch.cat(module.got), torch.cat(expected.got))
            assert trainer.callback_metrics["loss"] == metric
            _require_same(module, expected.losses, weights)
            _require_equal_to_the_engine(config, module)

    _run(train, tmp_path)


@pytest.mark.deep
def test_checkpoints_and_resuming(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        def fit(strategy: Any, resumes: Path | None = None, *, epochs: int) -> Any:
            saver = pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
            more = {"callbacks": [saver], "enable_checkpointing": True} if resumes is None else {}
            return _fit(tmp_path, strategy, resumes, max_epochs=epochs, **more)[0]

        expected = fit("infinity_stage_3_nvme", epochs=2)
        assert sorted(os.listdir(tmp_path / "saved")) == ["epoch=0.ckpt", "epoch=1.ckpt"]
        found = fit("infinity_stage_2", tmp_path / "saved" / "epoch=0.ckpt", epochs=2)
        assert len(found.losses) == 8
        _require_same(found, expected.losses[8:], dict(expected.state_dict()))

    _run(train, tmp_path)


@pytest.mark.deep
def test_manual_optimization(tmp_path: Path) -> None:
    """Gradients are whole for a script that clips them, in stage 2, too."""

    def train(rank: int) -> None:
        for stage, clips in ((0, True), (2, True), (2, False)):
            modules = [Module(is_manual=True, clips=clips) for _ in range(2)]
            expected, _ = _fit(tmp_path, "ddp", module=modules[0])
            config = {"zero_optimization": {"stage": stage}}
            found, _ = _fit(tmp_path, Strategy(config=config), module=modules[1])
            _require_same(found, expected.losses, dict(expected.state_dict()))

    _run(train, tmp_path)


@pytest.mark.deep
def test_clipping_by_value(tmp_path: Path) -> None:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}

    def train(rank: int) -> None:
        expected, _ = _fit(tmp_path, "ddp", **options)
        for stage in (0, 2):
            found, _ = _fit(tmp_path, Strategy(config={"zero_optimization": {"stage": stage}}), **options)
            _require_same(found, expected.losses, dict(expected.state_dict()))

    _run(train, tmp_path)


@pytest.mark.deep
def test_what_is_refused(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        with pytest.raises(ConfigError, match=r"counts 1 process\(es\), and 2 train together"):
            _fit(tmp_path, "infinity_stage_1", devices=1)
        with pytest.raises(ConfigError, match="sync_batchnorm"):
            _fit(tmp_path, "infinity_stage_1", sync_batchnorm=True)

    _run(train, tmp_path)


@pytest.mark.deep
def test_as_deepspeed(tmp_path: Path) -> None:
    """Lightning's own DeepSpeedStrategy under torchrun."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "infinity.as_deepspeed"]
    run([*launch, "-m", "tests.stand_in.lightning_ranks", str(tmp_path)], TMPDIR=str(tmp_path))  # for logs of torchrun
