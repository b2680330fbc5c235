"""Updates of chunks, whose main weights are split (bf16 weight and 16-bit remainder), against torch on whole float32 weights,
bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from infinity.numerics.chunk_format import ChunkBuffer
from infinity.numerics.remainder import join, split
from infinity.numerics.state_format import StateFormat
from infinity.optim.classes import Lion
from infinity.optim.fused_adam import FusedAdam
from infinity.optim.slice_updater import SliceUpdater
from infinity.optim.wrapped_optimizer import WrappedOptimizer, wrap_optimizer
from infinity.units.layout import ParameterSlice
from infinity.updates.chunk_updater import ChunkUpdater
from infinity.updates.job import ParameterState, advance
from tests.unit.optim.slices import cut, equal_bits

_REPOSITORY = Path(__file__).resolve().parents[3]
_NUM_STEPS = 4
_NUMELS = (1, 15, 16, 17, 63, 64, 1000, 4096, 100_003, 300_000)

_OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any], bool]] = [
    (AdamW, {"fused": True, "weight_decay": 0.1}, True),
    (AdamW, {"fused": True, "weight_decay": 0.0, "betas": (0.5, 0.9)}, True),
    (AdamW, {"fused": True, "betas": (0.2, 0.99), "eps": 1e-3}, True),
    (AdamW, {"fused": True, "lr": torch.tensor(1e-2)}, True),
    (AdamW, {"fused": True, "amsgrad": True}, False),
    (AdamW, {"fused": True, "maximize": True}, False),
    (AdamW, {}, False),
    (AdamW, {"foreach": True}, False),
    (Adam, {"fused": True}, True),
    (Adam, {"fused": True, "weight_decay": 0.1}, True),
    (Adam, {}, False),
    (SGD, {"fused": True, "momentum": 0.9, "nesterov": True}, False),
    (SGD, {}, False),
    (Adagrad, {}, False),
    (RMSprop, {"centered": True}, False),
    (Lion, {"weight_decay": 0.1}, False),
]
_CASES = [
    pytest.param(cls, options, is_fused, id=f"{cls.__name__}-{options}".replace(" ", ""))
    for cls, options, is_fused in _OPTIMIZERS
]


class _Rig:
    """One parameter in halves, updated in slices; and the same in plain torch."""

    def __init__(self, cls: type[Optimizer], options: dict[str, Any], numel: int) -> None:
        generator = torch.Generator().manual_seed(numel)
        initial = torch.randn(numel, generator=generator)
        make: Any = cls
        arguments = {"lr": 3e-3, **options}
        self.main = nn.Parameter(initial.clone())
        self.plain = make([self.main], **arguments)
        stand_in = nn.Parameter(initial.clone())
        self.wrapped_optimizer: WrappedOptimizer = wrap_optimizer(
            make([stand_in], **arguments), [("weight", stand_in)], "cpu"
        )
        slices = SliceUpdater(self.wrapped_optimizer)
        fused = FusedAdam.of(self.wrapped_optimizer, torch.device("cpu"))
        self.kept = ParameterState()
        self.updater = ChunkUpdater(slices, {(0, 0): self.kept}, fused=fused, splits_main_weights=True)
        self.weight = torch.empty(numel, dtype=torch.bfloat16)
        self.remainder = torch.empty(numel, dtype=torch.int16)
        split(initial, self.weight, self.remainder)
        # What lies there before the first step means nothing.
        self.state = {name: torch.full((numel,), 7.0) for name in slices.state_names(0)}

    def step(self, gradient: Tensor, scale: Tensor | None, seed: int) -> None:
        self.main.grad = gradient.float() if scale is None else gradient.float() * scale
        self.plain.step()
        kept = gradient.clone()
        slot: Any = SimpleNamespace(index=0, spec=SimpleNamespace(fqn="weight"))
        job: Any = SimpleNamespace(
            unit=SimpleNamespace(index=0),
            updates_all=True,
            numbers=None,
            slots={0},
            groups={0: self.wrapped_optimizer.read().values[0]},
            clip_coefficient=scale,
            advanced={},
        )
        for span in cut(self.weight.numel(), 3, seed):
            states = {name: values[span] for name, values in self.state.items()}
            weight, remainder = self.weight[span], self.remainder[span]
            workspace = ChunkBuffer(
                None, remainder, states, torch.empty(weight.shape), weight, torch.empty(0), StateFormat.FP32
            )
            part = gradient[span]
            job.gradients = SimpleNamespace(
                dtype=gradient.dtype, is_kept=False, values=None, of_chunk=lambda *_, part=part: part
            )
            chunk: Any = SimpleNamespace(index=0, slices=[ParameterSlice(slot, span.start, span.stop, 0)])
            self.updater.update(job, chunk, workspace)
        advance({(0, 0): self.kept}, job)
        assert torch.equal(gradient.view(torch.int16), kept.view(torch.int16)), (
            "the gradient is not the updater's to change"
        )

    def require_equal(self) -> None:
        joined = torch.empty(self.weight.numel())
        join(self.weight, self.remainder, joined)
        assert equal_bits(joined, self.main.detach())
        expected = self.plain.state[self.main]
        assert set(self.kept.names or ()) | set(self.kept.scalars) == set(expected)
        for name in self.kept.names or ():
            assert equal_bits(self.state[name], expected[name]), name
        for name, value in self.kept.scalars.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), name


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("cls", "options", "is_fused"), _CASES)
def test_pieces_in_halves_have_the_bits_of_torch(
    cls: type[Optimizer], options: dict[str, Any], is_fused: bool, dtype: torch.dtype
) -> None:
    for numel in _NUMELS:
        rig = _Rig(cls, options, numel)
        generator = torch.Generator().manual_seed(numel + 1)
        for step in range(_NUM_STEPS):
            gradient = (torch.randn(numel, generator=generator) * 10.0 ** (-2 * step)).to(dtype)
            scale = torch.tensor(0.37 / (step + 1)) if step % 2 else None
            rig.step(gradient, scale, seed=step)
            for group in (*rig.plain.param_groups, *rig.wrapped_optimizer.param_groups):
                group["lr"] = group["lr"] * 0.75
            rig.require_equal()
        runs = rig.updater.fused is not None and rig.updater.fused.runs(rig.wrapped_optimizer.read().values[0])
        assert runs == (is_fused and _machine_has_kernel())


def _machine_has_kernel() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def test_extreme_values_take_the_same_way() -> None:
    edges = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 1e38, -3e38, 1e-20, 65504.0])
    numel = 4096
    rig = _Rig(AdamW, {"fused": True, "weight_decay": 0.3}, numel)
    for step in range(3):
        rig.step(edges.repeat(numel // len(edges)).roll(step), None, seed=step)
        rig.require_equal()


def test_not_a_number_comes_through_as_one() -> None:
    rig = _Rig(AdamW, {"fused": True}, 64)
    gradient = torch.zeros(64)
    gradient[3], gradient[5] = float("nan"), float("inf")
    rig.step(gradient, None, seed=0)
    joined = torch.empty(64)
    join(rig.weight, rig.remainder, joined)
    assert torch.equal(joined.isnan(), rig.main.detach().isnan())
    assert bool(joined.isnan()[3])
    assert equal_bits(joined[6:], rig.main.detach()[6:])


def test_hyperparameters_that_change_take_another_way_and_back() -> None:
    """A group may be set to maximize, or lose `fused`, between two steps."""
    rig = _Rig(AdamW, {"fused": True}, 1000)
    generator = torch.Generator().manual_seed(0)
    for step, changes in enumerate(({}, {"maximize": True}, {"maximize": False, "weight_decay": 0.5}, {"eps": 1e-4})):
        for group in (*rig.plain.param_groups, *rig.wrapped_optimizer.param_groups):
            group.update(changes)
        rig.step(torch.randn(1000, generator=generator), None, seed=step)
        rig.require_equal()


def test_a_kernel_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    update = FusedAdam.update

    def spoiled(self: FusedAdam, group: Any, weight: Tensor, *rest: Any) -> Any:
        scalars = update(self, group, weight, *rest)
        weight.view(torch.int16)[100] += 1
        return scalars

    monkeypatch.setattr(FusedAdam, "update", spoiled)
    rig = _Rig(AdamW, {"fused": True}, 1000)
    assert rig.updater.fused is None
    rig.step(torch.ones(1000), None, seed=0)
    rig.require_equal()


@pytest.mark.deep
@pytest.mark.parametrize("capability", ["avx2", "avx512"])
def test_every_vector_width_of_torch(capability: str) -> None:
    """torch chooses its code by the processor, as in all other tests; a variable takes it down to an older one."""
    if capability == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip(f"this processor has no AVX-512, torch runs {torch.backends.cpu.get_cpu_capability()}")
    code = (
        "import torch, pytest\n"
        "from tests.unit.updates.test_chunk_updater import _Rig\n"
        "from torch.optim import AdamW\n"
        "torch.set_num_threads(2)\n"
        "for numel in (23, 4096, 100_003):\n"
        "    rig = _Rig(AdamW, {'fused': True, 'weight_decay': 0.1}, numel)\n"
        "    generator = torch.Generator().manual_seed(0)\n"
        "    for step in range(3):\n"
        "        rig.step(torch.randn(numel, generator=generator), None, seed=step)\n"
        "    rig.require_equal()\n"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(_REPOSITORY)}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=560, check=False
    )
    assert answer.returncode == 0, answer.stderr
