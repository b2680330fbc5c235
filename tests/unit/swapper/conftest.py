"""Several directories, which many tests of volumes want."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three directories: a, b and c."""
    found = [tmp_path / name for name in "abc"]
    for path in found:
        path.mkdir()
    return found
