"""Host memory is a budget: a training that is given no more than it promised lives, from the first step on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.internals import Cgroup

_MIB = 1 << 20


@pytest.mark.root
@pytest.mark.deep
@pytest.mark.parametrize(
    ("update", "schedule", "slack_bytes", "changes"),
    [
        # Slack: what the C library's heap keeps of freed temporaries until it is trimmed, and the kernel's own pages.
        pytest.param("in_backward", "ordinary", 64 * _MIB, {}, id="in-backward"),
        pytest.param("deferred", "ordinary", 32 * _MIB, {"gradient_clipping": 1.0}, id="deferred"),
        pytest.param(
            "in_backward",
            "vertical",
            160 * _MIB,  # each micro-batch has a heap of its own
            {"gradient_accumulation_steps": 4, "infinity": {"schedule": "vertical"}},
            id="vertical",
        ),
    ],
)
def test_a_training_stays_inside_its_budget(
    update: str,
    schedule: str,
    slack_bytes: int,
    changes: dict[str, Any],
    nvme_dir: Path,
    memory_cgroup: Cgroup,
    run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    group = str(memory_cgroup.task_files[0].parent)
    code = (
        f"from tests.budgeted_training import train\ntrain({group!r}, {str(nvme_dir)!r}, {slack_bytes}, {changes!r})\n"
    )
    ended = run_in_cgroup(memory_cgroup, code)
    assert memory_cgroup.num_out_of_memory_kills == 0, "the kernel ended it: it took more memory than its budget"
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert (answer["update"], answer["schedule"]) == (update, schedule)


@pytest.mark.root
@pytest.mark.deep
def test_state_dicts_are_made_saved_and_loaded_without_memory_of_their_own(
    nvme_dir: Path,
    memory_cgroup: Cgroup,
    run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    group = str(memory_cgroup.task_files[0].parent)
    slack_bytes = 112 * _MIB  # the flat buffer of the largest unit, 65 MB, which is part of the budget; and some
    code = f"from tests.budgeted_training import save\nsave({group!r}, {str(nvme_dir)!r}, {slack_bytes})\n"
    ended = run_in_cgroup(memory_cgroup, code)
    assert memory_cgroup.num_out_of_memory_kills == 0, "the kernel ended it"
    assert ended.returncode == 0, ended.stderr
    assert all(num_bytes > slack_bytes for num_bytes in json.loads(ended.stdout)["num_bytes"])
