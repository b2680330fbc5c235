"""Weights that are given back to the model when an engine is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.engine import export_calls
from infinity.errors import InfinityError
from tests.exactness.lockstep import Lockstep, make_batch


def test_weights_that_find_no_room_are_told_of_and_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export_calls, "free_bytes", lambda: 1000)
    (tmp_path / "drive").mkdir()
    for is_saved in (False, True):
        caplog.clear()
        with Lockstep.start(tmp_path / "drive") as both:
            both.engine_step(0)
            if is_saved:
                both.engine.save_16bit_model(tmp_path / "out")
        told = [
            record.getMessage() for record in caplog.records if "are released with the engine" in record.getMessage()
        ]
        assert len(told) == (not is_saved)
        assert all("save_16bit_model" in text and "restore_weights=True" in text for text in told)
        for _, param in both.model.named_parameters():
            with pytest.raises(InfinityError, match=r"closed|lost with the engine"):
                param + 1
        with pytest.raises(InfinityError):
            both.model(**make_batch(0))
