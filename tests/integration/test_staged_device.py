"""The path of a GPU, on the CPU: weights come through pages and an upload thread, gradients leave from the device.

The device is the CPU treated as if its memory were a GPU's, with copies that run as late as they may. What it trains must
have the bits of plain torch, as what the ordinary CPU device trains has, and no copy may overtake what it has to follow.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infinity.engine.resources import EngineResources
from infinity.errors import BudgetTooSmallError
from infinity.planning import placement
from infinity.planning.cost_model import best_placement
from infinity.planning.inputs import Request, UnitSize
from infinity.planning.placement import Placement
from infinity.vertical import eligibility as worth
from tests.exactness.families import FAMILIES
from tests.exactness.grid import Row
from tests.exactness.shapes import SHAPES
from tests.exactness.verification import require_exact_training
from tests.lazy_device import LazyDevice

_CASES = {case.name: case for case in (*SHAPES, *FAMILIES)}
_UPLOAD_PAGE_BYTES = 8192
MODELS = (
    "tied_weights",
    "frozen_middle",
    "skipped_blocks",
    "experts",
    "foreign_weight",
    "transposed",
    "mixed_dtypes",
    "lora",
    "llama",
    "gpt2",
    "t5",
)

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
    Row(budget="half", dtype="bf16", page="small"),
    Row(budget="half", accumulation=3, clipping=True, checkpointing="reentrant", prefetch=False),
    Row(budget="everything", dtype="bf16"),
    Row(budget="everything", clipping=True, page="small", update="deferred", checkpointing="non_reentrant"),
    Row(budget="everything", accumulation=3, dtype="bf16", main_weights="fp32", loop="plain"),
)


def _least_device_memory(units: Sequence[UnitSize], request: Request) -> int:
    with pytest.raises(BudgetTooSmallError) as caught:
        placement.place(units, dataclasses.replace(request, device_budget_bytes=0))
    return caught.value.minimum_bytes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    """What engines are made on in this test, with as little of its memory for weights as can be.

    Pages for uploads are small enough to cut the units of small models.
    """
    lazy = LazyDevice()
    open_storage = EngineResources.__init__

    def place(units: Sequence[UnitSize], request: Request, order: Sequence[int], backward_start: int) -> Placement:
        if request.param_tier != "none":
            request = dataclasses.replace(request, device_budget_bytes=_least_device_memory(units, request))
        return best_placement(units, request, order, backward_start)

    def opened(self: EngineResources, *args: Any, **kwargs: Any) -> None:
        open_storage(self, *args, **kwargs)
        lazy.watch(self.pool)

    # The function of the same name hides the module in the package's namespace.
    module = importlib.import_module("infinity.initialize")
    monkeypatch.setattr(module, "device_for", lambda torch_device: lazy)
    monkeypatch.setattr(worth, "best_placement", place)
    monkeypatch.setattr(placement, "_UPLOAD_PAGE_BYTES", _UPLOAD_PAGE_BYTES)
    monkeypatch.setattr(EngineResources, "__init__", opened)
    return lazy


def _require_exact(name: str, row: Row, directory: Path, device: LazyDevice) -> None:
    require_exact_training(_CASES[name], row, directory)
    assert not device.violations
    if row.offload_param != "none":
        assert device.num_lazy > 0, "weights took another way"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_staged_training_has_the_bits_of_plain_torch(row: Row, tmp_path: Path, device: LazyDevice) -> None:
    _require_exact("plain", row, tmp_path, device)


@pytest.mark.parametrize("row", [ROWS[3], ROWS[6], ROWS[15], ROWS[18]], ids=lambda row: row.name)
@pytest.mark.parametrize("name", MODELS)
def test_staged_training_of_other_models(name: str, row: Row, tmp_path: Path, device: LazyDevice) -> None:
    _require_exact(name, row, tmp_path, device)
