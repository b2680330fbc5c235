"""Tensors whose memory lies on a drive are tensors like any other."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.device.drive_tensors import DriveTensors, on_drive, write_out
from infinity.errors import StorageError
from swapper.volumes import mapped_memory


def free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def test_a_tensor_has_its_values_after_its_pages_were_dropped(tmp_path: Path) -> None:
    tensor = DriveTensors([tmp_path]).empty((300, 400), torch.float32)
    torch.manual_seed(0)
    tensor.normal_()
    write_out()
    torch.manual_seed(0)
    assert on_drive(tensor)
    assert torch.equal(tensor, torch.empty(300, 400).normal_())
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_strides_and_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (8, 64, 16, 16)).to(dtype).to(memory_format=torch.channels_last)
    parameter = nn.Parameter(source.clone(), requires_grad=False)
    assert DriveTensors([tmp_path]).move(parameter)
    assert on_drive(parameter)
    assert parameter.stride() == source.stride() and torch.equal(parameter, source)


def test_memory_that_somebody_else_looks_at_stays(tmp_path: Path) -> None:
    tensors, values = DriveTensors([tmp_path]), torch.randn(100, 100)
    parameter = nn.Parameter(values)
    assert not tensors.move(parameter)
    values.zero_()
    assert not parameter.detach().any()
    del values
    assert tensors.move(parameter) and on_drive(parameter)
    of_numpy = nn.Parameter(torch.from_numpy(torch.randn(100, 100).numpy()))
    assert not tensors.move(of_numpy) and not on_drive(of_numpy)


def test_what_nobody_has_touched_is_not_written(tmp_path: Path) -> None:
    memory = torch.empty(64 << 20, dtype=torch.uint8)
    memory[5 << 20] = 1
    found = list(mapped_memory.touched(memory.data_ptr(), memory.numel()))
    assert any(start <= 5 << 20 < stop for start, stop in found)
    assert sum(stop - start for start, stop in found) < memory.numel() // 4


@pytest.mark.root
def test_space_goes_back_with_the_tensor(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(64 << 20)
    tensors, free = DriveTensors([directory]), free_bytes(directory)
    kept = tensors.empty((1 << 20,), torch.uint8)
    tensor = tensors.empty((40 << 20,), torch.uint8)
    assert free - free_bytes(directory) >= 41 << 20
    del tensor
    gc.collect()
    assert free - free_bytes(directory) < 2 << 20
    assert kept.shape


@pytest.mark.deep
def test_little_of_it_is_in_memory(nvme_dir: Path) -> None:
    before = mapped_memory._mapped_bytes()
    tensor = DriveTensors([nvme_dir]).empty((8 * mapped_memory.WINDOW_BYTES,), torch.uint8)
    for part in tensor.split(1 << 20):
        part.fill_(1)
    assert mapped_memory._mapped_bytes() - before < 5 * mapped_memory.WINDOW_BYTES
    write_out()
    assert mapped_memory._mapped_bytes() - before < 8 << 20
    assert bool((tensor == 1).all())


def test_a_directory_that_is_too_small_is_named_with_the_bytes(small_tmpfs: Callable[[int], Path]) -> None:
    directory = small_tmpfs(8 << 20)
    with pytest.raises(StorageError, match=f"{directory}.*{64 << 20} bytes are needed") as caught:
        DriveTensors([directory]).empty((16 << 20,), torch.float32)
    assert caught.value.directory == directory


def test_another_directory_takes_what_one_has_no_room_for(small_tmpfs: Callable[[int], Path], tmp_path: Path) -> None:
    tensors = DriveTensors([small_tmpfs(1 << 20), tmp_path])
    made = [tensors.empty((4 << 20,), torch.uint8).fill_(number) for number in range(4)]
    assert [int(tensor[-1]) for tensor in made] == [0, 1, 2, 3]
