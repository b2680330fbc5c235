"""`infinity.timeline`: off unless a file is named; its path is made absolute, and looked at only when training begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.config import load_config
from infinity.errors import ConfigError

_BASE = {"train_micro_batch_size_per_gpu": 1}


def _timeline(value: object) -> Path | None:
    return load_config(_BASE | {"infinity": {"timeline": value}}).infinity.timeline


@pytest.mark.parametrize("value", [None, "auto"])
def test_off(value: object) -> None:
    assert _timeline(value) is None
    assert load_config(_BASE).infinity.timeline is None


@pytest.mark.parametrize("path", ["~nobody9/a", "~"])
def test_a_home_that_nobody_knows(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"infinity\.timeline.*not known.*HOME"):
        _timeline(path)
    offload = {"device": "nvme", "nvme_path": path}
    with pytest.raises(ConfigError, match=r"offload_param\.nvme_path.*not known.*HOME"):
        load_config(_BASE | {"zero_optimization": {"offload_param": offload}})


@pytest.mark.parametrize("value", ["", 3, True, [], ["a.json"], {"path": "a.json"}, "a\0b"])
def test_what_is_no_path(value: object) -> None:
    with pytest.raises(ConfigError, match=r"infinity\.timeline.*must be the path of a file"):
        _timeline(value)
