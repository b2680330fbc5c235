"""Training on a GPU: the bits of plain torch on the same GPU, in memory that holds the resident units and no more."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from swapper import StagingPool
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.on_device import require_exact_training_on
from tests.exactness.shapes import SHAPES
from tests.gpu.libraries import load_libraries
from tests.internals import BY_NAME
from tests.quantized import quantize

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
_CASES = {case.name: case for case in (*SHAPES, *FAMILIES)}

ROWS = (
    Row(),
    Row(budget="tight", page="small", checkpointing="reentrant"),
    Row(dtype="bf16", page="small", checkpointing="non_reentrant"),
    Row(dtype="bf16", accumulation=3, clipping=True, prefetch=False),
    Row(accumulation=3, clipping=True, optimizer="groups", budget="tight"),
    Row(offload_param="cpu", offload_optimizer="none", dtype="bf16"),
    Row(offload_param="none", offload_optimizer="none", optimizer="instance", clipping=True),
    Row(offload_param="none", offload_optimizer="cpu", loop="plain"),
    Row(offload_param="cpu", offload_optimizer="none", dtype="bf16", state_dtype="bf16"),
    Row(offload_param="cpu", offload_optimizer="none", state_dtype="int8"),
    Row(dtype="bf16", state_dtype="int8"),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_training_has_the_bits_of_plain_torch_on_the_same_gpu(row: Row, tmp_path: Path) -> None:
    require_exact_training_on(DEVICE, _CASES["plain"], row, tmp_path)


@pytest.mark.parametrize("name", ["tied_weights", "frozen_middle", "skipped_blocks", "llama", "gpt2", "t5"])
def test_other_models_have_them_too(name: str, tmp_path: Path) -> None:
    # GPT-2 has dropout, whose numbers come from the GPU's generator: both runs seed it alike.
    require_exact_training_on(DEVICE, _CASES[name], ROWS[3], tmp_path)


_WIDTH = 2048
_NUM_BLOCKS = 12
_UNIT_BYTES = 4 * _WIDTH * _WIDTH
_SLACK_BYTES = 16 << 20


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()


def _config(directory: Path, **own: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory_budget": "256MiB", **own},
    }


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("num_units", [2, 4])
def test_device_memory_is_bounded_by_the_resident_units(num_units: int, clipping: float, tmp_path: Path) -> None:
    load_libraries(_WIDTH)
    before = torch.cuda.memory_allocated()
    config = {**_config(tmp_path, device_memory_budget=num_units * _UNIT_BYTES), "gradient_clipping": clipping}
    engine, *_ = infinity.initialize(model=_Stack(), config=config)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    x = torch.randn(4, _WIDTH, device=DEVICE)
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    engine.flush()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    # Gradients: one unit's in the hands of autograd, two whose update has not fetched them yet, and one for the norm.
    assert peak < (num_units + 4) * _UNIT_BYTES + _SLACK_BYTES, f"{peak / _UNIT_BYTES:.1f} units"
    assert peak >= num_units * _UNIT_BYTES, "the budget was not used"
    engine.close()  # which gives the model its weights back
    del engine
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < _SLACK_BYTES


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["nf4", "int8", "fp8_e4m3"])
def test_one_kernel_unpacks_frozen_weights(
    name: str, dtype: str, keeps: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have the bits that are made on the CPU, whether they rest packed on the GPU or come from the drive."""
    losses = []
    for is_packed in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
        for linear in model:
            linear.weight.requires_grad_(False)
        if not is_packed:
            quantize(model, name, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
        config = _config(tmp_path, keep_in_memory=keeps, **({"frozen_dtype": name} if is_packed else {}))
        config["infinity"]["device_memory_budget"] = 6 * 4 * 300 * 300
        config |= {} if dtype == "fp32" else {dtype: {"enabled": True}}
        engine, *_ = infinity.initialize(model=model, config=config)
        with engine:
            inputs = torch.ones(4, 300, device=DEVICE, dtype=next(engine.module.parameters()).dtype)
            for _ in range(3):
                loss = engine(inputs).float().square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach().cpu())
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    assert "unpacked by torch's operations" not in caplog.text


def test_uploads_and_computation_overlap_in_training(tmp_path: Path) -> None:
    """Somewhere in a step a copy to the device and a kernel run at the same time."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    config = _config(tmp_path, device_memory_budget=4 * _UNIT_BYTES)
    engine, *_ = infinity.initialize(model=_Stack(), config=config)
    x = torch.randn(8192, _WIDTH, device=DEVICE)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(4):
            engine.backward(engine(x))
            engine.step()
        engine.flush()
        torch.cuda.synchronize()
    engine.close()
    copies, kernels = [], []
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CUDA:
            span = (event.time_range.start, event.time_range.end)
            (copies if "HtoD" in event.name else kernels if "Mem" not in event.name else []).append(span)
    assert copies
    assert any(start < copy_end and copy_start < end for copy_start, copy_end in copies for start, end in kernels)


def test_pages_of_an_engine_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging_pools: list[StagingPool] = []
    made = StagingPool.__init__

    def noted(self: StagingPool, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        staging_pools.append(self)

    monkeypatch.setattr(StagingPool, "__init__", noted)
    config = _config(tmp_path, device_memory_budget=4 * _UNIT_BYTES, keep_in_memory=False)
    engine, *_ = infinity.initialize(model=_Stack(), config=config)
    assert len(staging_pools) >= 2, "one for weights on their way up, one for optimizer state"
    assert all(staging_pool.is_pinned for staging_pool in staging_pools)
    engine.close()
    assert not any(staging_pool.is_pinned for staging_pool in staging_pools)


def test_the_optimizers_state_is_on_the_gpu_where_nothing_offloads_it(tmp_path: Path) -> None:
    config = _config(tmp_path)
    config["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine, *_ = infinity.initialize(model=_Stack(), config=config)
    # fp32: two moments for each weight.
    assert torch.cuda.memory_allocated() - before >= 2 * _NUM_BLOCKS * _UNIT_BYTES
    engine.close()


def test_muon_has_the_bits_of_its_class_on_the_same_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, paged = (nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(2))
    paged.load_state_dict(plain.state_dict())
    plain = plain.to(DEVICE)
    weights, rest = ([p for p in plain.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": weights, "use_muon": True}, {"params": rest, "use_muon": False}]
    optimizer = BY_NAME["muon"](groups, lr=0.01, adam_lr=0.001)
    config = _config(tmp_path)
    config["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    config["optimizer"] = {"type": "Muon", "params": {"muon_lr": 0.01, "adam_lr": 0.001}}
    engine, *_ = infinity.initialize(model=paged, config=config)
    for number in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value.to(DEVICE), plain.state_dict()[name]), name
    engine.close()
