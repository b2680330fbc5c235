"""Formats of packed weights against their definitions in plain torch; in place, apart, and by torch's operations."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from infinity.packed import formats
from infinity.packed.formats import NotFiniteError, PackedFormat, packed_format
from tests.quantized import FORMATS

_SHAPES = [(128, 256), (130, 200), (7, 65), (1, 64), (2, 1000), (129, 64), (3, 5, 70)]
_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))
    values.view(-1)[:64] = 0.0  # a block of nothing
    values.view(-1)[-1] = 1e-7
    return values.to(dtype)


def _packed(form: PackedFormat, weight: torch.Tensor) -> torch.Tensor:
    stored = torch.full((form.num_bytes(weight.shape),), 0xAB, dtype=torch.uint8)
    form.pack(weight.view(-1), weight.shape, stored)
    return stored


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_become_what_the_definition_says(name: str, dtype: torch.dtype) -> None:
    form = packed_format(name)
    if name == "bf16" and dtype != torch.float32:
        return  # not packed then
    for shape in _SHAPES:
        weight = _weight(shape, dtype)
        stored, expected = _packed(form, weight), FORMATS[name](weight).view(-1)
        apart, by_torch = torch.empty(weight.numel(), dtype=dtype), torch.empty(weight.numel(), dtype=dtype)
        form.unpack(stored, shape, apart)
        form._unpack_by_torch(stored, shape, by_torch)
        assert torch.equal(apart, expected), shape
        assert torch.equal(by_torch, expected), shape
        if dtype.itemsize == 2 or name == "nf4":
            again = torch.empty_like(apart)
            form.unpack(_packed(form, apart.view(shape)), shape, again)
            assert torch.equal(again, apart), "what was unpacked packs without loss"
        padded = -(-weight.numel() // 64) * 64
        if form.saves_memory(shape, dtype.itemsize, padded):
            memory = torch.empty(padded * dtype.itemsize, dtype=torch.uint8)
            landing = memory[memory.numel() - stored.numel() :]
            landing.copy_(stored)
            in_place = memory.view(dtype)[: weight.numel()]
            form.unpack(landing, shape, in_place)
            assert torch.equal(in_place, expected), shape


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    weight = _weight((4, 64), torch.float32)
    weight[3, 5] = value
    with pytest.raises(NotFiniteError):
        _packed(packed_format(name), weight)


def test_weights_that_would_grow_are_not_packed() -> None:
    assert not packed_format("int8").saves_memory((64, 3), 2, 192)
    assert packed_format("int8").saves_memory((64, 32), 2, 2048)
    assert packed_format("nf4").saves_memory((1, 1), 2, 64)


def test_nf4_takes_0_28_of_the_bytes_of_bf16() -> None:
    shape = (4096, 4096)
    assert packed_format("nf4").num_bytes(shape) / (2 * math.prod(shape)) == 36 / 128


_WITHOUT_COMPILER = """
import torch
from infinity.packed.formats import packed_format
from tests.quantized import FORMATS
weight = torch.randn(3, 70, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
for name in ("nf4", "int8", "fp8_e4m3"):
    form = packed_format(name)
    memory = torch.empty(256, dtype=torch.bfloat16)
    stored = memory.view(torch.uint8)[-form.num_bytes(weight.shape) :]
    form.pack(weight.view(-1), weight.shape, stored)
    form.unpack(stored, weight.shape, memory[: weight.numel()])
    assert torch.equal(memory[: weight.numel()], FORMATS[name](weight).view(-1)), name
"""


@pytest.mark.deep
def test_without_a_compiler_weights_are_the_same() -> None:
    """``NUMBA_DISABLE_JIT`` is there for debugging; kernels that use instructions of the processor do not run then."""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", _WITHOUT_COMPILER], env=environment, check=True)


_ON_A_GPU = """
import torch
from infinity.packed.formats import packed_format
from tests.unit.packed.test_formats import _SHAPES, _packed, _weight
for name in ("nf4", "int8", "fp8_e4m3"):
    form = packed_format(name)
    for dtype in (torch.float16, torch.float32):
        for shape in _SHAPES:
            weight = _weight(shape, dtype)
            stored = _packed(form, weight)
            found, expected = torch.empty(weight.numel(), dtype=dtype), torch.empty(weight.numel(), dtype=dtype)
            form.unpack(stored, shape, expected)
            form._unpack_on_gpu(stored, shape, found)
            assert torch.equal(found, expected), (name, dtype, shape)
"""


@pytest.mark.deep
def test_the_kernel_of_gpus_makes_the_same_weights() -> None:
    """In Triton's interpreter. That one cuts bf16 off where a GPU rounds, so there are no weights in bf16."""
    pytest.importorskip("triton", reason="torch for CUDA brings Triton along; elsewhere: pip install triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _ON_A_GPU], env=environment, check=True)


def test_a_kernel_that_does_not_run_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU it has none to run on, wherever Triton is installed."""
    assert not formats._has_gpu_kernel(packed_format("nf4"), torch.float32, torch.device("cpu"))
    assert "unpacked by torch's operations" in caplog.text
