"""What two ranks send of their gradients: rounded by the config, or by communication hooks of torch.distributed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import mse_loss

import infinity
from infinity.errors import ConfigError, RankError, StepError
from tests.distributed.common import weights_of
from tests.internals import world
from tests.ranks import require_ranks

pytestmark = pytest.mark.deep

_STEPS = 4


class _Experts(nn.Module):
    """Of which rank 0 uses one, and rank 1 both; a third is used by nobody."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inside = nn.Linear(8, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.outside = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, num_used: int) -> torch.Tensor:
        x = self.inside(x.to(self.inside.weight.dtype)).tanh()
        for expert in self.experts[:num_used]:
            x = x + expert(x)
        return self.outside(x)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return _Experts()


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x[:, :4].sum(1, keepdim=True).sin()


def _config(directory: Path, offload: str = "none", stage: int = 0, **changes: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    memory: dict[str, Any] = {"progress_bars": False}
    if offload == "nvme":
        directory.mkdir(parents=True, exist_ok=True)
        drive = {"device": "nvme", "nvme_path": str(directory / "drive")}
        zero |= {"offload_optimizer": drive} | ({"offload_param": drive} if stage == 3 else {})
        memory |= {"host_memory_budget": "64MiB", "keep_in_memory": False}
    adam = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    base = {"optimizer": adam, "zero_optimization": zero, "infinity": memory}
    return base | {"train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0} | changes


def _trained(config: dict[str, Any], rank: int, hook: tuple[Any, Callable[..., Any]] | None = None) -> dict[str, Any]:
    engine = infinity.initialize(model=_model(), config=config)[0]
    if hook is not None:
        engine.register_comm_hook(*hook)
    sent = world().sent_bytes["gradients"]
    for step in range(_STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = _batch(step, rank)
            engine.backward(mse_loss(engine(x, rank + 1).float(), y))
            engine.step()
    sent = world().sent_bytes["gradients"] - sent
    found: dict[str, Any] = weights_of(engine)
    engine.close()
    return found | {"sent": sent}


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert name == "sent" or torch.equal(found[name], value), name


def _plain(mean: Callable[[list[torch.Tensor]], torch.Tensor]) -> dict[str, Any]:
    """Both ranks in one process, in plain torch."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)
    for step in range(_STEPS):
        of_ranks = []
        for rank in range(2):
            x, y = _batch(step, rank)
            found = torch.autograd.grad(mse_loss(model(x, rank + 1), y), [*model.parameters()], allow_unused=True)
            of_ranks.append(found)
        for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
            if any(each is not None for each in grads):
                parameter.grad = mean([torch.zeros_like(parameter) if each is None else each for each in grads])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "nvme"), (2, "none"), (3, "nvme")])
def test_communication_data_type_halves_the_bytes(stage: int, offload: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def rounded(grads: list[torch.Tensor]) -> torch.Tensor:
        halves = [(each * 0.5).to(dtype).float() for each in grads]
        return (halves[0] + halves[1]).to(dtype).float()

    expected = _plain(rounded)

    def train(rank: int) -> None:
        config = _config(tmp_path / str(rank), offload, stage)
        exact = _trained(copy.deepcopy(config), rank)
        name = {torch.bfloat16: "BF16", torch.float16: "torch.float16"}[dtype]
        found = _trained(config | {"communication_data_type": name}, rank)
        _assert_equal(found, expected)
        assert any(not torch.equal(exact[name], value) for name, value in expected.items())
        assert found["sent"] * 2 == exact["sent"] > 0

    require_ranks(2, train, tmp_path)


@pytest.mark.deep(but=2)
@pytest.mark.parametrize(
    ("stage", "offload", "changes"),
    [
        (0, "none", {}),
        (0, "nvme", {"gradient_accumulation_steps": 3}),
        (1, "none", {"gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical", "progress_bars": False}}),
        (1, "nvme", {"fp16": {"enabled": True}}),
        (1, "nvme", {"bf16": {"enabled": True}}),
    ],
)
def test_a_hook_that_averages_gives_the_same_bits(
    stage: int, offload: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        config = _config(tmp_path / str(rank), offload, stage, **changes)
        expected = _trained(copy.deepcopy(config), rank)
        found = _trained(config, rank, (None, allreduce_hook))
        _assert_equal(found, expected)
        assert found["sent"] == 0 < expected["sent"]

    require_ranks(2, train, tmp_path)


@pytest.mark.parametrize("stage", [0, 1])
def test_power_sgd_gives_the_bits_of_ddp(stage: int, tmp_path: Path) -> None:
    """One parameter, for DDP's buckets have another order than units, and each draws random numbers."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(8, 8, bias=False)

    def losses(model: Any, rank: int, step: Callable[[torch.Tensor], None]) -> None:
        for number in range(8):
            x, _ = _batch(number, rank)
            step(mse_loss(model(x), x.sin()))

    def state() -> PowerSGDState:
        return PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)

    def train(rank: int) -> None:
        config = _config(tmp_path, stage=stage, gradient_clipping=0.0)
        engine = infinity.initialize(model=made(), config=config)[0]
        own, others = state(), state()
        engine.register_comm_hook(own, powerSGD_hook)

        def with_engine(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        losses(engine, rank, with_engine)
        model = made()
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel.register_comm_hook(others, powerSGD_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)

        def with_torch(loss: torch.Tensor) -> None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        losses(parallel, rank, with_torch)
        assert torch.equal(engine.module.state_dict()["weight"], model.weight)
        assert own.iter == others.iter > 3 and own.compression_stats() == others.compression_stats()

    require_ranks(2, train, tmp_path)


def test_what_a_hook_cannot_be_combined_with(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        for stage in (2, 3):
            engine = infinity.initialize(model=_model(), config=_config(tmp_path, stage=stage))[0]
            with pytest.raises(ConfigError, match="this stage divides them"):
                engine.register_comm_hook(None, allreduce_hook)
            engine.close()
        params = {"lr": 0.01, "freeze_step": 2}
        config = _config(tmp_path, gradient_clipping=0.0, optimizer={"type": "OneBitAdam", "params": params})
        engine = infinity.initialize(model=_model(), config=config)[0]
        with pytest.raises(ConfigError, match="it exchanges momenta in one bit"):
            engine.register_comm_hook(None, allreduce_hook)
        engine.close()
        engine = infinity.initialize(model=_model(), config=_config(tmp_path, gradient_accumulation_steps=2))[0]
        with pytest.raises(RankError, match="fp16_compress_hook on rank 0, allreduce_hook on rank 1"):
            engine.register_comm_hook(None, allreduce_hook if rank else fp16_compress_hook)
        engine.register_comm_hook(None, lambda state, bucket: None)
        with pytest.raises(StepError, match="there is a communication hook already"):
            engine.register_comm_hook(None, allreduce_hook)
        x, y = _batch(0, rank)
        engine.backward(mse_loss(engine(x, 1), y))
        engine.step()
        with pytest.raises(RankError, match="gave a NoneType, not a Future of a tensor of"):
            engine.backward(mse_loss(engine(x, 1), y))

    require_ranks(2, train, tmp_path)


def test_a_hook_beside_tensor_parallelism_is_told_its_group(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def trained(hook: bool) -> dict[str, Any]:
            config = _config(tmp_path / str(rank), "nvme", 1)
            engine = infinity.initialize(model=_model(), config=config, mesh_param=mesh)[0]
            if hook:
                for state in (None, PowerSGDState(None)):
                    with pytest.raises(ConfigError, match="names no process group, and processes have 2 parts"):
                        engine.register_comm_hook(state, allreduce_hook)
                engine.register_comm_hook(mesh["dp"].get_group(), allreduce_hook)
            for step in range(2):
                x, y = _batch(step, rank // 2)
                engine.backward(mse_loss(engine(x, 2), y))
                engine.step()
            found: dict[str, Any] = weights_of(engine)
            engine.close()
            return found

        _assert_equal(trained(True), trained(False))

    require_ranks(4, train, tmp_path)


def test_one_process_calls_no_hook(tmp_path: Path) -> None:
    with infinity.initialize(model=_model(), config=_config(tmp_path))[0] as engine:
        engine.register_comm_hook(None, fp16_compress_hook)
        x, y = _batch(0, 0)
        engine.backward(mse_loss(engine(x, 1), y))
        engine.step()
        assert engine.global_steps == 1
