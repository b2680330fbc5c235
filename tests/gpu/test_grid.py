"""The exactness grid and all models on a GPU, with as little of its memory for weights as can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.families import FAMILIES
from tests.exactness.grid import CI_ROWS, Row
from tests.exactness.on_device import give_least_device_memory, require_exact_training_on
from tests.exactness.shapes import SHAPES

pytestmark = [
    pytest.mark.gpu,
    # Plain torch says so as well, of weights that were moved to the GPU one by one.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning"),
]

_MODELS = (*SHAPES, *FAMILIES)
(_PLAIN,) = (case for case in SHAPES if case.name == "plain")
_ROWS = (
    Row(dtype="bf16", budget="tight", page="small", checkpointing="non_reentrant"),
    Row(clipping=True, budget="tight", page="small", optimizer="instance"),
    Row(budget="half", dtype="bf16", page="small"),
    Row(budget="everything", accumulation=3, dtype="bf16", main_weights="fp32", loop="plain"),
    Row(accumulation=3, clipping=True, dtype="bf16", workers=3),
    Row(offload_param="none", offload_optimizer="none", dtype="bf16"),
)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    give_least_device_memory(monkeypatch)


@pytest.mark.parametrize("row", CI_ROWS, ids=lambda row: row.name)
def test_settings(row: Row, tmp_path: Path) -> None:
    require_exact_training_on("cuda", _PLAIN, row, tmp_path)


@pytest.mark.parametrize("turn", [0, 3])
@pytest.mark.parametrize("number", range(len(_MODELS)), ids=lambda number: _MODELS[number].name)
def test_models(number: int, turn: int, tmp_path: Path) -> None:
    require_exact_training_on("cuda", _MODELS[number], _ROWS[(number + turn) % len(_ROWS)], tmp_path)
