"""Pickled objects in a checkpoint."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest

from infinity.checkpoint.values import unpickled
from infinity.errors import CheckpointError


def test_objects_that_unpack_to_more_than_there_is_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([]))
        archive.writestr("archive/data/0", bytes(1 << 20))
    with pytest.raises(CheckpointError, match="compressed"):
        unpickled(tmp_path, file.getvalue())
