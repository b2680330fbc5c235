"""What a commit says of states has to be possible; what cannot be read is told with its cure."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.checkpoint.arrays import reading_from
from infinity.checkpoint.training_state_checks import check_counters, check_states
from infinity.errors import CheckpointError
from infinity.loading import weight_files

_STEP = {"step": torch.tensor(2.0)}


@pytest.mark.parametrize(
    "state",
    [(_STEP, ("exp_avg",), 2, False), (_STEP, (), 2, False), ({}, None, 0, True)],
    ids=["updated", "without element-wise states", "not updated yet"],
)
def test_states_that_an_optimizer_leaves(state: Any) -> None:
    check_states({"weight": state}, ["exp_avg"])


@pytest.mark.parametrize(
    "state",
    [
        (_STEP, None, 2, False),  # AdamW's next step would look for what is not there
        ({}, ("exp_avg",), 0, True),
        (_STEP, ("other",), 2, False),
        ({"step": "2"}, ("exp_avg",), 2, False),
        (_STEP, ("exp_avg",), 2.0, False),
        (_STEP, ("exp_avg",), 2, 0),
    ],
)
def test_states_that_no_optimizer_leaves_are_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="the state of 'weight' is none"):
        check_states({"weight": state}, ["exp_avg"])


_SCALE = {"dynamic": True, "scale": 65536.0, "patience": 1, "num_finite": 3, "num_steps": 7}
_COUNTERS = {"global_steps": 1, "micro_steps": 2, "skipped_steps": 0, "global_samples": 4}


def test_counters_of_checkpoints() -> None:
    check_counters({**_COUNTERS, "loss_scale": _SCALE})
    without = {name: value for name, value in _SCALE.items() if name != "num_steps"}
    check_counters({**_COUNTERS, "loss_scale": without})  # as DeepSpeed's


@pytest.mark.parametrize("name", _SCALE)
@pytest.mark.parametrize("value", [[1], "1", None, float("inf"), float("nan")])
def test_a_loss_scale_that_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="something else than numbers"):
        check_counters({**_COUNTERS, "loss_scale": {**_SCALE, name: value}})


def test_a_limit_on_open_files_is_not_told_as_a_lack_of_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(CheckpointError, match="ulimit -n"), reading_from(tmp_path):
        fail()
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(weight_files, "_open", fail)
    with pytest.raises(CheckpointError, match="ulimit -n"):
        weight_files.open_weights(tmp_path)
