"""What may be read into and written from."""

from __future__ import annotations

import array
import ctypes

import numpy as np
import pytest
import torch

from swapper import ArgumentError
from swapper.memory.buffer import bytes_of


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_a_tensor_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    view = bytes_of(tensor, for_read=True)
    assert view.dtype == np.uint8 and view.shape == (tensor.nbytes,)
    assert view.__array_interface__["data"][0] == tensor.data_ptr()
    view[:] = 1
    assert tensor.view(torch.uint8).sum() == tensor.nbytes


def test_a_scalar_and_a_parameter_that_requires_grad() -> None:
    assert bytes_of(torch.tensor(1.5), for_read=False).size == 4
    assert bytes_of(torch.nn.Parameter(torch.zeros(4)), for_read=True).size == 16


@pytest.mark.parametrize(
    "buffer",
    [bytearray(12), np.zeros((2, 3), dtype=np.int16), array.array("i", [0, 0, 0]), memoryview(bytearray(12))],
    ids=lambda buffer: type(buffer).__name__,
)
def test_other_buffers(buffer: object) -> None:
    view = bytes_of(buffer, for_read=True)
    view[:] = 255
    assert view.size == 12
    assert bytes(memoryview(buffer).cast("B")) == b"\xff" * 12  # type: ignore[arg-type]


def test_a_write_may_come_from_read_only_memory() -> None:
    assert bytes_of(b"abc", for_read=False).tolist() == [97, 98, 99]
    with pytest.raises(ArgumentError, match="read-only"):
        bytes_of(b"abc", for_read=True)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(4, 4).t(), "not contiguous"),
        (torch.zeros(4, device="meta"), "device 'meta'"),
        (torch.zeros(4).to_sparse(), "not contiguous"),
        (np.zeros((4, 4))[:, ::2], "not contiguous"),
        (np.array([object()]), "ndarray of objects has no bytes"),
        (np.zeros(2, dtype=[("a", "i4"), ("b", "O")]), "ndarray of objects has no bytes"),
        ((ctypes.py_object * 2)(), "objects has no bytes"),
        (np.ma.masked_array([1, 2], mask=[True, False]), "the mask of a MaskedArray would be lost"),
        (np.zeros((4, 4), dtype="M8[s]")[:, ::2], "not contiguous"),
        (object(), "object has no memory"),
        ([1, 2], "list has no memory"),
        (None, "NoneType has no memory"),
    ],
)
def test_what_cannot_be_transferred(buffer: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bytes_of(buffer, for_read=False)


@pytest.mark.parametrize("dtype", ["M8[ns]", "m8[D]"])
def test_times_are_bytes_as_well(dtype: str) -> None:
    times = np.zeros((2, 3), dtype=dtype)
    view = bytes_of(times, for_read=True)
    view[:] = 1
    assert view.shape == (48,) and (times.view(np.int64) == 0x0101010101010101).all()
    assert bytes_of(np.zeros(0, dtype=dtype), for_read=False).size == 0
    times.flags.writeable = False
    assert bytes_of(times, for_read=False).size == 48
    with pytest.raises(ArgumentError, match="read-only"):
        bytes_of(times, for_read=True)
