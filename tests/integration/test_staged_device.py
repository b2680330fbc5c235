"""The path of a GPU, on the CPU: weights come through pages and an upload thread, gradients leave from the device.

`SeparateHostDevice` is the CPU treated as if its memory were a GPU's. What it trains must have the bits of plain torch,
as what the ordinary CPU device trains has.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity import placement
from infinity.device import ComputeDevice, SeparateHostDevice
from infinity.placement import Placement, Request, UnitSize
from infinity.storage import Storage
from tests.exactness.case import Case
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.shapes import SHAPES
from tests.exactness.verification import require_exact_training
from tests.lazy_device import LazyDevice

_CASES = {case.name: case for case in (*SHAPES, *FAMILIES)}
_UPLOAD_PAGE_BYTES = 8192

ROWS = (
    Row(),
    Row(budget="tight", page="small"),
    Row(budget="tight", page="small", prefetch=False, checkpointing="reentrant"),
    Row(dtype="bf16", budget="tight", page="small", checkpointing="non_reentrant"),
    Row(dtype="bf16", accumulation=3, clipping=True, page="small"),
    Row(accumulation=3, budget="tight", optimizer="groups"),
    Row(clipping=True, budget="tight", page="small", optimizer="instance"),
    Row(loop="plain", budget="tight", dtype="bf16", accumulation=3, clipping=True),
    Row(loop="plain", prefetch=False),
    Row(offload_param="cpu", accumulation=3, clipping=True, prefetch=False),
    Row(offload_param="cpu", offload_optimizer="none", dtype="bf16"),
    Row(offload_param="none", page="small", dtype="bf16", clipping=True),
    Row(offload_param="none", offload_optimizer="none", accumulation=3, optimizer="groups"),
    Row(offload_optimizer="none", budget="tight", clipping=True, checkpointing="non_reentrant"),
    Row(offload_optimizer="cpu", page="auto", dtype="bf16"),
)


class CountingDevice(SeparateHostDevice):
    """Counts what passes, so that a test on the wrong path cannot succeed."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_uploads = 0

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: object) -> object:
        self.num_uploads += 1
        return super().upload(target, source, after)


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], ComputeDevice]], None]:
    """A function that says what engines are made on from now on.

    Pages for uploads cut the units of small models; of the device's memory there is as little as can be.
    """
    # The function of the same name hides the module in the package's namespace.
    module = importlib.import_module("infinity.initialize")

    def place(units: Sequence[UnitSize], request: Request) -> Placement:
        two_largest = sum(sorted(unit.weight_bytes for unit in units)[-2:])
        return placement.place(units, dataclasses.replace(request, device_budget_bytes=two_largest))

    def use(make: Callable[[], ComputeDevice]) -> None:
        monkeypatch.setattr(module, "device_for", lambda torch_device: make())
        monkeypatch.setattr(module, "place", place)
        monkeypatch.setattr(placement, "_UPLOAD_PAGE_BYTES", _UPLOAD_PAGE_BYTES)

    return use


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("name", ["plain", "tied_weights", "frozen_middle"])
def test_staged_training_has_the_bits_of_plain_torch(
    name: str, row: Row, tmp_path: Path, make_device: Callable[..., None]
) -> None:
    device = CountingDevice()
    make_device(lambda: device)
    require_exact_training(_CASES[name], row, tmp_path)
    if row.offload_param != "none":
        assert device.num_uploads > 0


@pytest.mark.parametrize(
    "name", ["skipped_blocks", "experts", "transposed", "mixed_dtypes", "lora", "llama", "gpt2", "t5"]
)
def test_staged_training_of_other_models(name: str, tmp_path: Path, make_device: Callable[..., None]) -> None:
    case: Case = _CASES[name]
    device = CountingDevice()
    make_device(lambda: device)
    for number, row in enumerate((ROWS[1], ROWS[4])):
        directory = tmp_path / str(number)
        directory.mkdir()
        require_exact_training(case, row, directory)
    assert device.num_uploads > 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("name", ["plain", "skipped_blocks"])
def test_nothing_relies_on_copies_that_nobody_waited_for(
    name: str, row: Row, tmp_path: Path, make_device: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LazyDevice()
    make_device(lambda: device)
    open_storage = Storage.__init__

    def opened(self: Storage, *args: Any, **kwargs: Any) -> None:
        open_storage(self, *args, **kwargs)
        device.watch(self.pool)

    monkeypatch.setattr(Storage, "__init__", opened)
    require_exact_training(_CASES[name], row, tmp_path)
    assert not device.violations
    if row.offload_param != "none":
        assert device.num_lazy > 0
