"""Aligned memory: exact, private, not inherited, and gone when nobody needs it."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from swapper import ALIGNMENT, AlignedRegion, ArgumentError

_LARGE = (3 << 20) + ALIGNMENT


def _mapping(address: int, num_bytes: int) -> dict[str, str] | None:
    """The kernel's view of the mapping that holds these bytes; neighbours may have been merged into it."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        head = line.split()
        low, dash, high = head[0].partition("-")
        if dash and not head[0].endswith(":") and int(low, 16) <= address and address + num_bytes <= int(high, 16):
            values = {"permissions": head[1]}
            for detail in lines:
                key, _, value = detail.partition(":")
                values[key] = value.strip()
                if key == "VmFlags":
                    return values
    return None


@pytest.mark.parametrize("num_bytes", [1, ALIGNMENT, ALIGNMENT + 1, _LARGE])
def test_is_aligned_and_exactly_as_large_as_asked(num_bytes: int) -> None:
    region = AlignedRegion(num_bytes)
    array = region.array()
    assert region.num_bytes == array.size == num_bytes
    assert array.dtype == np.uint8 and array.flags.writeable
    assert region.address == array.__array_interface__["data"][0]
    assert region.address % ALIGNMENT == 0
    assert not array.any()


def test_is_private_and_not_inherited_by_children() -> None:
    region = AlignedRegion(_LARGE)
    mapping = _mapping(region.address, _LARGE)
    assert mapping["permissions"] == "rw-p"
    assert "dc" in mapping["VmFlags"].split(), "MADV_DONTFORK is not set"


def test_the_peak_is_the_most_that_regions_had_at_one_time() -> None:
    gc.collect()  # regions of other tests
    AlignedRegion.pop_peak_bytes()
    before = AlignedRegion.pop_peak_bytes()
    first, second = AlignedRegion(_LARGE), AlignedRegion(1)
    first.release()
    third = AlignedRegion(ALIGNMENT)
    assert AlignedRegion.pop_peak_bytes() == before + _LARGE + ALIGNMENT
    assert AlignedRegion.pop_peak_bytes() == before + 2 * ALIGNMENT, "it begins anew with what there is"
    del second, third


def test_release_unmaps_at_once_without_arrays() -> None:
    region = AlignedRegion(_LARGE)
    address = region.address
    assert _mapping(address, _LARGE) is not None
    region.release()
    assert region.is_released
    assert _mapping(address, _LARGE) is None
    region.release()
    with pytest.raises(ArgumentError, match="has been released"):
        region.array()


def test_release_waits_for_the_last_view() -> None:
    region = AlignedRegion(_LARGE)
    address = region.address
    tensor = torch.from_numpy(region.array())[100:200].view(torch.float32)
    region.release()
    tensor.fill_(3.0)
    assert _mapping(address, _LARGE) is not None
    assert tensor.sum() == 75.0
    del tensor
    gc.collect()
    assert _mapping(address, _LARGE) is None


def test_a_forked_child_does_not_unmap_what_is_not_its_own() -> None:
    region = AlignedRegion(_LARGE)
    address = region.address
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads: torch has some
        child = os.fork()
    if child == 0:
        status = 1
        try:
            # The hole that the region leaves in a child is the first place that the kernel gives away again.
            others = [AlignedRegion(_LARGE) for _ in range(64)]
            arrays = [other.array() for other in others]
            for array in arrays:
                array[:] = 7
            region.release()
            del region
            gc.collect()
            status = 0 if all((array == 7).all() for array in arrays) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    region.array()[:] = 1
    assert region.address == address


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_needs_a_size(num_bytes: int) -> None:
    with pytest.raises(ArgumentError, match="at least one byte"):
        AlignedRegion(num_bytes)


def test_what_is_discarded_takes_no_memory_and_the_rest_stays() -> None:
    region = AlignedRegion(3 * (2 << 20))
    array = region.array()
    array[:] = 9
    resident = _mapping(region.address, region.num_bytes)
    assert region.discard(ALIGNMENT) == 0
    assert region.discard((4 << 20) + 17) == 4 << 20
    assert (array[4 << 20 :] == 9).all()
    after = _mapping(region.address, region.num_bytes)
    if resident is not None and after is not None:
        assert int(resident["Rss"].split()[0]) - int(after["Rss"].split()[0]) == 4096
    with pytest.raises(ArgumentError):
        region.discard(region.num_bytes + 1)
    region.release()
    with pytest.raises(ArgumentError):
        region.discard(0)
