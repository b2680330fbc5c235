"""Whoever reads the profile may go away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.deep
def test_a_profile_that_nobody_reads_ends_as_every_command_does(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "infinity", "profile", str(tmp_path), "--quick", "--no-fio"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write)
    assert ended.returncode == 141, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())
