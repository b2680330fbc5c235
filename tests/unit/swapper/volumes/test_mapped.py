"""A mapped file, where a directory has room for it."""

from __future__ import annotations

import os
from pathlib import Path

from swapper.volumes.mapped_memory import mapped_file


def test_where_there_is_no_room_copies_are_in_memory(tmp_path: Path) -> None:
    with mapped_file([tmp_path / "missing"], 10) as file:
        assert file is None
    with mapped_file([tmp_path], 1 << 60) as file:
        assert file is None
    assert os.listdir(tmp_path) == []
