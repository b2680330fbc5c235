"""Training with weights that go straight to the device's memory, with drivers and devices that stand in for real ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.errors import StorageError
from swapper.backends import gds
from tests.exactness.lockstep import PLAIN, SHAPES_BY_NAME, Lockstep, everything_on_nvme
from tests.fake_device_files import FakeDriver
from tests.lazy_device import LazyDevice
from tests.separate_host import SeparateHostDevice

pytestmark = pytest.mark.deep

_CHANGES: list[dict[str, Any]] = [
    {},
    {"gradient_clipping": 0.1, "bf16": {"enabled": True}},
    {"gradient_accumulation_steps": 2},
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(gds, "find_driver", lambda: fake)
    return fake


def _use(monkeypatch: pytest.MonkeyPatch, make: Callable[[], SeparateHostDevice]) -> None:
    module = importlib.import_module("infinity.entry")
    monkeypatch.setattr(module, "device_for", lambda torch_device: make())


@pytest.mark.parametrize("changes", _CHANGES, ids=["fp32", "bf16-clip", "ga2"])
@pytest.mark.parametrize("device", [SeparateHostDevice, LazyDevice])
@pytest.mark.parametrize("name", ["plain", "tied_weights", "called_twice"])
def test_training_is_bit_identical(
    name: str,
    device: type[SeparateHostDevice],
    changes: dict[str, Any],
    tmp_path: Path,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _use(monkeypatch, device)
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME[name], changes={**changes, "aio": {"use_gds": True}}) as both:
        for step in range(3):
            both.engine_step(step)
        both.require_equal()
    assert any(name == "read" for name, *_ in driver.calls[2:]), "weights took another way"
    assert driver.handles == {}


def test_where_it_cannot_be_had_training_goes_on_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    _use(monkeypatch, SeparateHostDevice)
    with Lockstep.start(tmp_path, changes={"aio": {"use_gds": True}}) as both:
        both.engine_step(0)
        both.require_equal()
    lines = [record.message for record in caplog.records if "use_gds" in record.message]
    assert lines == ["aio.use_gds has no effect, data goes through host memory: torch sees no CUDA device"]


def test_who_insists_gets_an_error_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = everything_on_nvme(tmp_path, {"infinity": {"io_backend": "gds"}})
    with pytest.raises(StorageError, match=r"torch sees no CUDA device.*infinity.io_backend to \"auto\""):
        infinity.initialize(model=PLAIN.make("none"), config=config)


def test_on_the_cpu_it_is_not_even_tried(tmp_path: Path, driver: FakeDriver) -> None:
    with Lockstep.start(tmp_path, changes={"aio": {"use_gds": True}}) as both:
        both.engine_step(0)
        both.require_equal()
    assert driver.calls == []
