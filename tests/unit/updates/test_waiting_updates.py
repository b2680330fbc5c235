"""Units that wait for their update while another one fails."""

from __future__ import annotations

from unittest import mock

import pytest

from infinity.config.load import load_config
from infinity.updates.stepper import Stepper


@pytest.mark.parametrize(("fails", "left"), [("await_update", "abc"), ("before_updates", "bc")])
def test_units_behind_one_that_fails_still_wait(fails: str, left: str) -> None:
    """One whose gradients went into the failed update does not."""
    stepper = Stepper(
        [],
        [],
        load_config({"train_batch_size": 1, "gradient_clipping": 0, "infinity": {"update": "in_backward"}}),
        **{name: mock.MagicMock() for name in ("device", "parameter_cache", "trimmer", "gradients", "stream")},
        **{name: mock.MagicMock() for name in ("step_groups", "exchange", "mesh", "before_updates")},
    )
    units = {name: mock.MagicMock(index=name) for name in "abc"}
    stepper._waiting = [(unit, {}) for unit in units.values()]
    failing = stepper.before_updates if fails == "before_updates" else stepper.parameter_cache.await_update
    assert isinstance(failing, mock.MagicMock)
    failing.side_effect = OSError
    with pytest.raises(OSError):
        stepper.finish_backward(updates_now=False)
    assert [unit.index for unit, _ in stepper._waiting] == list(left)
    assert not stepper.updated
