"""Main weights are read chunk by chunk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import infinity
from infinity.checkpoint.record_stream import RecordStream
from tests.exactness.lockstep import everything_on_nvme


def test_main_weights_that_share_a_chunk_are_read_with_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[tuple[int, int]] = Counter()
    opened = RecordStream._open

    def counted(stream: RecordStream, unit: Any, chunk: Any, *what: Any, **how: Any) -> Any:
        found = opened(stream, unit, chunk, *what, **how)
        reads[unit.index, chunk.index] += found is not None
        return found

    monkeypatch.setattr(RecordStream, "_open", counted)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)])
    changes = {"bf16": {"enabled": True}, "infinity": {"units": ["Sequential"]}}
    wrapped = torch.nn.ModuleDict({"body": model})
    wrapped.forward = lambda x: model(x)  # type: ignore[method-assign]
    expected = {name: value.detach().clone() for name, value in wrapped.state_dict().items()}
    with infinity.initialize(model=wrapped, config=everything_on_nvme(tmp_path, changes))[0] as engine:
        engine.save_fp32_model(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    found = load_file(file)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert set((+reads).values()) == {1}
