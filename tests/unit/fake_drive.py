"""A drive that is measured at once, and is as fast as a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swapper.measure.measurement import IOSetting, Sample, Workload
from swapper.volumes.directory import Directory

Speed = Callable[[IOSetting], float]


class FakeDrive:
    """Stands in for `DriveTest`.

    Attributes:
        speed: bytes per second with a setting.
        errors: what a backend raises, by its name.
        problem: what fails before anything is measured.
        fill_share: how much of the file is filled in time.
        opened: what was opened; measured: with what.
    """

    num_bytes = 1 << 30
    fill_share = 1.0
    is_direct = True

    def __init__(self, speed: Speed = lambda setting: 1e9, errors: dict[str, Exception] | None = None) -> None:
        self.speed, self.errors = speed, errors or {}
        self.problem: BaseException | None = None
        self.opened: list[tuple[list[Directory], int, dict[str, Any]]] = []
        self.measured: list[tuple[IOSetting, Workload]] = []
        self.num_open = 0

    def __call__(self, directories: list[Directory], file_bytes: int, **options: Any) -> FakeDrive:
        self.opened.append((directories, file_bytes, options))
        self.num_bytes = file_bytes
        return self

    def __enter__(self) -> FakeDrive:
        self.num_open += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.num_open -= 1

    def prepare(self, *, max_seconds: float) -> None:
        assert max_seconds > 0
        if self.problem is not None:
            raise self.problem
        self.num_bytes = int(self.fill_share * self.num_bytes)

    def measure(self, setting: IOSetting, workload: Workload, seconds: float, **_: object) -> Sample:
        self.measured.append((setting, workload))
        if error := self.errors.get(setting.backend):
            raise error
        half = int(self.speed(setting) / 2)
        return Sample(setting, workload, half, half, 1.0, 0.1)
