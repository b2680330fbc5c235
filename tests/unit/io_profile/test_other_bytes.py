"""A drive that gives back other bytes than were written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_SHORT = ["--size", "96MiB", "--request-sizes", "1MiB,4MiB", "--in-flight", "4,8", "--seconds", "0.02"]
_SHORTEST = [*_SHORT, "--repetitions", "1", "--backends", "threads", "--no-fio"]


@pytest.mark.deep
def test_a_drive_that_gives_back_other_bytes_is_reported(small_tmpfs: Callable[[int], Path], tmp_path: Path) -> None:
    # Somebody else writes into the file between filling and checking: `sitecustomize` is run before the tool.
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "def spoil(original):\n"
        "    def prepare(self, *arguments, **keywords):\n"
        "        original(self, *arguments, **keywords)\n"
        "        with open(self.paths[0], 'r+b') as file:\n"
        "            file.seek(5 << 20)\n"
        "            file.write(b'other bytes')\n"
        "    return prepare\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'infinity.io_profile.program':\n"
        "            from swapper.measure.measurement import DriveTest\n"
        "            DriveTest.prepare = spoil(DriveTest.prepare)\n"
        "import sys\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    directory = small_tmpfs(200 << 20)
    ended = subprocess.run(
        [sys.executable, str(_ROOT / "tools" / "profile_io.py"), str(directory), *_SHORTEST],
        env=os.environ | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
        check=False,
    )
    output = ended.stdout
    assert ended.returncode == 1, output
    assert "WrongDataError" in output
    assert str(directory) in output
    assert str(5 << 20) in output, "the place is named"
    assert "Traceback" not in output
