"""accelerate's number of processes has to be the engine's."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState

from infinity.deepspeed.entry import check_accelerate
from infinity.errors import ConfigError


def test_deepspeed_by_accelerate_is_refused_where_it_would_give_all_the_same_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"deepspeed_plugins": {"one": 1}, "num_processes": 1})
    check_accelerate(1)
    with pytest.raises(ConfigError, match="accelerate counts 1 process"):
        check_accelerate(2)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"deepspeed_plugins": None, "num_processes": 1})
    check_accelerate(2)
