"""The Adam kernel for GPUs, run on the processor: its source is compiled as C++, with NVIDIA's named operations as functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infinity.errors import StepError
from infinity.numerics.remainder import join, split
from infinity.optim import fused_adam
from infinity.optim.executor import OptimizerExecutor
from infinity.optim.fused_adam import ADAM, MOST_BLOCKS, STATES, THREADS, FusedAdam, GpuAdam
from infinity.optim.wrapped_optimizer import WrappedOptimizer, wrap_optimizer

_CPU = torch.device("cpu")
_DTYPES = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.float32)
"""Of a weight's two halves, its gradient and its two states."""
_OPERATIONS = r"""
#include <cmath>
#include <cstring>
#define __global__
struct Three { int x; };
static Three blockIdx, blockDim, threadIdx, gridDim;
static float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static int __float_as_int(float value) { int bits; std::memcpy(&bits, &value, 4); return bits; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
"""
_LAUNCHER = r"""
extern "C" void launch(int blocks, int threads, short* a, short* b, const void* c, float* d, float* e, const float* f,
                       const float* g, int h, int i, int j, int k, int l, int m, int n, int o, int p)
{
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            adam_on_split_weights(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);
}
"""


@pytest.fixture(scope="module")
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Stands for `compiled_for`: the kernel as a function of the processor."""
    if shutil.which("g++") is None:
        pytest.skip("the source is compiled for the processor by g++, which is not installed")
    directory = tmp_path_factory.mktemp("kernel")
    (directory / "kernel.cpp").write_text(_OPERATIONS + ADAM + _LAUNCHER)
    flags = ["-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "kernel.cpp", "-o", "kernel.so"], cwd=directory, check=True)
    library = ctypes.CDLL(str(directory / "kernel.so"))

    def compiled(device: torch.device, source: str, name: str, threads: int) -> Any:
        assert (source, name) == (ADAM, "adam_on_split_weights")

        def launch(blocks: int, arguments: Sequence[Any]) -> None:
            given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_int(a) for a in arguments]
            library.launch(blocks, threads, *given)

        return launch

    return compiled


def _multiply_add(a: Any, b: Any, c: Any) -> Any:
    """Rounded once: the product of two float32 is exact in numpy's long double, the sum nearly always."""
    return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)


@pytest.fixture
def launched(_compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs on the processor."""
    monkeypatch.setattr(fused_adam, "compiled_for", _compiled)


class _Torch:
    """What torch's kernel for GPUs computes, in NumPy: `ATen/native/cuda/fused_adam_utils.cuh` of torch 2.13."""

    power = ctypes.CDLL("libm.so.6").powf
    power.restype, power.argtypes = ctypes.c_float, [ctypes.c_float, ctypes.c_float]

    def __init__(self, is_decoupled: bool, *, first_of: int | None = None) -> None:
        """``first_of``: the first of so many elements has its decay rounded before it is added to the gradient."""
        self._is_decoupled = is_decoupled
        self._first_of = first_of

    def step(self, group: dict[str, Any], main: Any, slope: Any, state: dict[str, Any], count: float) -> Any:
        one, names = np.float32(1), ("lr", "weight_decay", "eps")
        lr, decay, eps = (np.float32(group[name]) for name in names)
        beta1, beta2 = map(np.float32, group["betas"])
        if decay != 0 and self._is_decoupled:
            main = _multiply_add(-(lr * decay), main, main)
        elif decay != 0:
            rounded, slope = main * decay + slope, _multiply_add(main, decay, slope)
            if self._first_of is not None:
                slope[:: self._first_of] = rounded[:: self._first_of]
        average = _multiply_add(beta1, state["exp_avg"], _multiply_add(-beta1, slope, slope))
        power = slope * slope
        square = _multiply_add(beta2, state["exp_avg_sq"], _multiply_add(-beta2, power, power))
        state.update(exp_avg=average, exp_avg_sq=square)
        step_size = lr / (one - np.float32(self.power(beta1, count)))
        correction = np.sqrt(one - np.float32(self.power(beta2, count)))
        return main - step_size * average / (np.sqrt(square) / correction + eps)


def _wrapped_optimizer(kind: Any, **options: Any) -> WrappedOptimizer:
    weight = nn.Parameter(torch.zeros(4))
    return wrap_optimizer(kind([weight], lr=3e-3, fused=True, **options), [("weight", weight)], _CPU)


def _made(kind: Any, **options: Any) -> tuple[GpuAdam, dict[str, Any]]:
    wrapped_optimizer = _wrapped_optimizer(kind, **options)
    kernel = GpuAdam(is_decoupled=kind is torch.optim.AdamW, device=_CPU)
    assert kernel._prepare()
    return kernel, wrapped_optimizer.read().values[0]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_it_computes_what_torchs_kernel_computes(launched: None, kind: Any, decay: float, dtype: torch.dtype) -> None:
    kernel, group = _made(kind, weight_decay=decay)
    reference = _Torch(kind is torch.optim.AdamW)
    for numel in (1, 1000, THREADS * 5 + 3):
        generator = torch.Generator().manual_seed(numel)
        main = torch.randn(numel, generator=generator)
        weight, remainder = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
        split(main, weight, remainder)
        state = {name: torch.zeros(numel) for name in STATES}
        expected, theirs = main.numpy().copy(), {name: np.zeros(numel, np.float32) for name in STATES}
        scalars: dict[str, Any] = {}
        for count in range(1, 5):
            gradient = (torch.randn(numel, generator=generator) * 10.0 ** (-2 * count)).to(dtype)
            scale = torch.tensor(0.37) if count % 2 else None
            slope = gradient.float() if scale is None else gradient.float() * scale
            expected = reference.step(group, expected, slope.numpy(), theirs, count)
            scalars = kernel.update(group, weight, remainder, gradient, scale, state, scalars)
            joined = torch.empty(numel)
            join(weight, remainder, joined)
            assert scalars["step"] == count
            assert np.array_equal(joined.numpy(), expected)
            assert all(np.array_equal(state[name].numpy(), theirs[name]) for name in STATES)


@pytest.mark.parametrize(
    ("betas", "count"), [((0.9, 255), 3.0), ((0.9, 0.999), -2.0), ((255, 0.5), 1e30), ((1.0, 0.5), 1.0)]
)
def test_betas_without_a_correction_for_bias_are_an_error_that_names_them(betas: Any, count: float) -> None:
    group = {"lr": 1e-3, "betas": betas, "weight_decay": 0.0, "eps": 1e-8}
    with pytest.raises(StepError, match=r"betas \(.*make a new engine"):
        FusedAdam(is_decoupled=True, device=_CPU).values(group, 1.0, count)


def test_a_coefficient_in_host_memory_is_brought_to_the_kernels_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of several processes, and of gradients that rest in host memory, are found there."""
    launches: list[list[Any]] = []
    monkeypatch.setattr(fused_adam, "compiled_for", lambda *args: lambda blocks, arguments: launches.append(arguments))
    there = torch.device("meta")  # what is not the CPU is all that counts
    kernel = GpuAdam(is_decoupled=True, device=there)
    assert kernel._prepare()
    weight, remainder, gradient, *states = (torch.zeros(8, dtype=dtype, device=there) for dtype in _DTYPES)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    kernel.update(group, weight, remainder, gradient, torch.tensor(0.5), dict(zip(STATES, states, strict=True)), {})
    (arguments,) = launches
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    assert len(tensors) == 7
    assert all(tensor.device == there for tensor in tensors)


def test_not_a_number_becomes_the_one_that_two_halves_can_hold(launched: None) -> None:
    kernel, group = _made(torch.optim.AdamW)
    weight, remainder = torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    state = {name: torch.zeros(3) for name in STATES}
    kernel.update(group, weight, remainder, torch.tensor([1.0, torch.nan, torch.inf]), None, state, {})
    joined = torch.empty(3)
    join(weight, remainder, joined)
    assert joined.isnan().tolist() == [False, True, True]
    assert joined.view(torch.int32)[1:].tolist() == [0x7FC00000] * 2


def test_long_pieces_go_in_several_launches(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And more elements than threads: each thread then takes several."""
    whole, parts = [], []
    for most, found in ((1 << 30, whole), (1000, parts)):
        monkeypatch.setattr(fused_adam, "MOST_NUMEL", most)
        monkeypatch.setattr(fused_adam, "MOST_BLOCKS", 2)
        kernel, group = _made(torch.optim.AdamW)
        weight, remainder = torch.ones(2500, dtype=torch.bfloat16), torch.zeros(2500, dtype=torch.int16)
        state = {name: torch.zeros(2500) for name in STATES}
        kernel.update(group, weight, remainder, torch.linspace(-1, 1, 2500), None, state, {})
        found += [weight, remainder, *state.values()]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert MOST_BLOCKS >= 1024


def _compute_as(rule: _Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's optimizer runs by ``rule``."""

    def run(self: OptimizerExecutor, group: Any, weights: Any, grads: Any, states: Any) -> Any:
        count = float(states[0]["step"]) + 1
        values = {name: states[0][name].numpy() for name in STATES}
        weights[0].copy_(torch.from_numpy(rule.step(group, weights[0].numpy(), grads[0].numpy(), values, count)))
        return [{"step": torch.tensor(count), **{name: torch.from_numpy(value) for name, value in values.items()}}]

    monkeypatch.setattr(OptimizerExecutor, "run", run)


@pytest.mark.parametrize("first_of", [None, 4])
def test_decay_that_torch_adds_in_another_way_is_left_to_it(
    launched: None, monkeypatch: pytest.MonkeyPatch, first_of: int | None
) -> None:
    """As its compiler has made it for Hopper: see `GpuAdam._adds_decay`. All else is the kernel's."""
    _compute_as(_Torch(False, first_of=first_of), monkeypatch)
    wrapped_optimizer = _wrapped_optimizer(torch.optim.Adam, weight_decay=0.1)
    kernel = GpuAdam.of(wrapped_optimizer, _CPU)
    group = wrapped_optimizer.read().values[0]
    assert kernel.runs({**group, "weight_decay": 0.0})
    assert kernel.runs({**group, "decoupled_weight_decay": True})
    assert kernel.runs(group) == (first_of is None)


@pytest.mark.parametrize("agrees", [True, False])
def test_the_trial_at_the_start_decides(launched: None, monkeypatch: pytest.MonkeyPatch, agrees: bool) -> None:
    """Against a torch that computes as it does on a GPU; and against this one, which has other bits on a processor."""
    if agrees:
        _compute_as(_Torch(True), monkeypatch)
    assert (GpuAdam.of(_wrapped_optimizer(torch.optim.AdamW), _CPU) is not None) == agrees


def test_without_a_compiler_there_is_no_kernel() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, and so a compiler")
    assert GpuAdam.of(_wrapped_optimizer(torch.optim.AdamW), torch.device("cuda")) is None


def test_a_launch_that_fails_leaves_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(blocks: int, arguments: Any) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(fused_adam, "compiled_for", lambda *_: launch)
    assert GpuAdam.of(_wrapped_optimizer(torch.optim.AdamW), _CPU) is None


def test_a_learning_rate_on_the_device_is_left_to_torch() -> None:
    group = {"fused": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    kernel = GpuAdam(is_decoupled=False, device=_CPU)
    assert kernel.runs({**group, "lr": torch.tensor(0.1)})
    assert not kernel.runs({**group, "lr": torch.tensor(0.1, device="meta")})


def test_nvidias_compiler_takes_the_source(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    (tmp_path / "kernel.cu").write_text(ADAM)
    subprocess.run(["nvcc", "-ptx", "-arch=sm_80", "kernel.cu", "-o", "kernel.ptx"], cwd=tmp_path, check=True)
    assert "adam_on_split_weights" in (tmp_path / "kernel.ptx").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_adam_kernel_is_found_to_have_torchs_bits(kind: type[torch.optim.Adam | torch.optim.AdamW]) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    optimizer = kind([weight], weight_decay=0.1, fused=True)
    kernel = GpuAdam.of(wrap_optimizer(optimizer, [("weight", weight)], "cuda"), weight.device)
    assert kernel.runs({**optimizer.param_groups[0], "weight_decay": 0.0})
    assert kernel.runs(optimizer.param_groups[0]) or kind is torch.optim.Adam, "whose decay is added to the gradient"
