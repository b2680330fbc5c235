"""Training on a GPU: the bits of plain torch on the same GPU, in memory that holds the resident units and no more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.exactness.driver import train
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.optimizers import MAX_NORM, torch_optimizer
from tests.exactness.paged import paged_trainer
from tests.exactness.record import Record, require_equal
from tests.exactness.reference import PlainTorch
from tests.exactness.shapes import SHAPES

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


class OnTheGpu(PlainTorch):
    """Plain torch with the model on the GPU and the optimizer where the config puts it.

    Gradients are accumulated, and clipped, on the CPU: that is where an engine keeps them until the step.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer],
        *,
        updates_on: str,
        **settings: Any,
    ) -> None:
        super().__init__(model, make_optimizer, **settings)
        self.model.to(DEVICE)
        self._gradients: dict[str, torch.Tensor] = {}
        for main in self.main.values():
            main.data = main.data.to(updates_on)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.num_micro_batches).backward()
        for fqn, param in self.trainable.items():
            if param.grad is not None:
                gradient = param.grad.float().cpu()
                known = self._gradients.get(fqn)
                self._gradients[fqn] = gradient if known is None else known + gradient
                param.grad = None

    def step(self) -> torch.Tensor:
        fqns = {id(main): fqn for fqn, main in self.main.items()}
        in_group_order = [fqns[id(main)] for group in self.param_groups for main in group["params"]]
        gradients = [self._gradients[fqn] for fqn in in_group_order if fqn in self._gradients]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.max_norm > 0:
            coefficient = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
            self._gradients = {fqn: gradient * coefficient for fqn, gradient in self._gradients.items()}
        for fqn, gradient in self._gradients.items():
            self.main[fqn].grad = gradient.to(self.main[fqn].device)
        self._gradients = {}
        self.update()
        return norm


def _without_norms(record: Record) -> Record:
    return Record([event for event in record.events if not event[0].startswith("norm")], record.final)


def _require_exact(name: str, row: Row, directory: Path) -> None:
    case = _CASES[name]
    settings: dict[str, Any] = {"dtype": row.compute_dtype, "accumulation": row.accumulation, "device": DEVICE}
    reference = OnTheGpu(
        case.make(row.checkpointing),
        lambda named: torch_optimizer(row.optimizer, named),
        updates_on=DEVICE if row.offload_optimizer == "none" else "cpu",
        compute_dtype=row.compute_dtype,
        num_micro_batches=row.accumulation if row.loop == "engine" else 1,
        max_norm=MAX_NORM if row.clipping else 0.0,
        rounds_half_up=row.rounds_half_up,
        rounds_gradients=row.rounds_gradients,
        state_dtype=row.state_dtype,
    )
    expected = train(reference, case.batch, **settings)
    trainer = paged_trainer(case, row, directory)
    assert trainer.engine.device.type == DEVICE
    try:
        actual = train(trainer, case.batch, **settings)
    finally:
        trainer.close()
    if not row.clipping:
        # Nothing depends on the norm then, and it is taken where the gradients are.
        for (what, wanted), (_, got) in zip(expected.events, actual.events, strict=True):
            if what.startswith("norm"):
                torch.testing.assert_close(got, wanted)
        expected, actual = _without_norms(expected), _without_norms(actual)
    require_equal(expected, actual, context=f"{name} with {row} on {torch.cuda.get_device_name()}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_training_has_the_bits_of_plain_torch_on_the_same_gpu(row: Row, tmp_path: Path) -> None:
    _require_exact("plain", row, tmp_path)


@pytest.mark.parametrize("name", ["tied_weights", "frozen_middle", "skipped_blocks", "llama", "gpt2", "t5"])
def test_other_models_have_them_too(name: str, tmp_path: Path) -> None:
    # GPT-2 has dropout, whose numbers come from the GPU's generator: both runs seed it alike.
    _require_exact(name, ROWS[3], tmp_path)


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
    _load_libraries()
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
    engine.close()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < _SLACK_BYTES


def _load_libraries() -> None:
    """cuBLAS keeps a workspace from its first use on: it is no part of what an engine takes."""
    layer = nn.Linear(_WIDTH, _WIDTH, bias=False, device=DEVICE)
    layer(torch.randn(4, _WIDTH, device=DEVICE, requires_grad=True)).sum().backward()
    del layer
    gc.collect()
    torch.cuda.synchronize()


def test_uploads_and_computation_overlap_in_training(tmp_path: Path) -> None:
    """Somewhere in a step a copy to the device and a kernel run at the same time."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    config = _config(tmp_path, device_memory_budget=4 * _UNIT_BYTES)
    engine, *_ = infinity.initialize(model=_Stack(), config=config)
    x = torch.randn(8192, _WIDTH, device=DEVICE)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
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


def test_pages_of_an_engine_are_pinned(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=_Stack(), config=_config(tmp_path))
    arenas = engine._storage._arenas
    assert len(arenas) == 2, "one for weights on their way up, one for optimizer state"
    assert all(arena.is_pinned for arena in arenas)
    engine.close()
    assert not any(arena.is_pinned for arena in arenas)


def test_the_optimizers_state_is_on_the_gpu_where_nothing_offloads_it(tmp_path: Path) -> None:
    config = _config(tmp_path)
    config["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine, *_ = infinity.initialize(model=_Stack(), config=config)
    # fp32: two moments for each weight.
    assert torch.cuda.memory_allocated() - before >= 2 * _NUM_BLOCKS * _UNIT_BYTES
    engine.close()
