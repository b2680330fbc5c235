"""Libraries save a model that is larger than what is left of their memory control group: natively, and as DeepSpeed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.internals import Cgroup
from tests.libraries_in_little_memory import LIBRARIES


@pytest.mark.root
@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_deepspeed", [False, True], ids=["native", "as_deepspeed"])
def test_no_checkpoint_of_a_library_breaks_the_budget(
    is_deepspeed: bool,
    nvme_dir: Path,
    memory_cgroup: Cgroup,
    run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    group = str(memory_cgroup.task_files[0].parent)
    call = f"run({group!r}, {str(nvme_dir)!r}, is_deepspeed={is_deepspeed})"
    ended = run_in_cgroup(memory_cgroup, f"from tests.libraries_in_little_memory import run\n{call}\n", 580)
    assert memory_cgroup.num_out_of_memory_kills == 0, "the kernel ended it"
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"library"')]
    assert tuple(answer["library"] for answer in answers) == LIBRARIES
    assert all(answer["saved_bytes"] > 10 * answer["allowed_bytes"] for answer in answers)
