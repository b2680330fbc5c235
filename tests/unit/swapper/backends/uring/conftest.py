"""A backend on a ring, for the tests of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper import Volume
from swapper.backends.uring.backend import UringBackend


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[UringBackend]:
    backend = UringBackend(Volume([tmp_path], 1 << 20), queue_depth=8)
    yield backend
    backend.close(20.0)
