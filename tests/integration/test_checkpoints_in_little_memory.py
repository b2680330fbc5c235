"""Checkpoints of a training whose states are several times what its memory control group allows, saved and loaded in it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.internals import Cgroup


@pytest.mark.root
@pytest.mark.deep
def test_states_of_several_times_the_memory_are_saved_and_loaded(
    nvme_dir: Path, memory_cgroup: Cgroup, run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    group = str(memory_cgroup.task_files[0].parent)
    code = f"from tests.saving_in_little_memory import run\nrun({group!r}, {str(nvme_dir)!r})\n"
    ended = run_in_cgroup(memory_cgroup, code)
    assert memory_cgroup.num_out_of_memory_kills == 0, "the kernel ended it"
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["is_same"]
    assert answer["num_bytes"] > 3 * answer["allowed"]
