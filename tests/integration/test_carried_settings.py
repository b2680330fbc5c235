"""What the caller's thread is set to holds where its work is done: in the update thread and in a vertical step's threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.exactness.case import loss_of
from tests.exactness.lockstep import Lockstep


class _Looking(torch.optim.AdamW):
    """Notes in which thread it runs, and what is set there."""

    seen: ClassVar[set[tuple[str, Any]]] = set()

    def step(self, closure: Any = None) -> Any:
        self.seen.add((threading.current_thread().name.rstrip("0123456789"), _settings()))
        return super().step(closure)


def _settings() -> tuple[Any, ...]:
    autocasts = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (*autocasts, torch.get_default_device())


_OWN_SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "device": lambda: torch.device("meta"),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("setting", _OWN_SETTINGS)
@pytest.mark.parametrize("update", ["deferred", "step"])
def test_what_users_set_for_their_thread_is_not_that_of_updates_nor_changed_by_them(
    update: str, setting: str, tmp_path: Path
) -> None:
    changes = {"optimizer": None, "infinity": {"update": update, "update_workers": 2}}
    with Lockstep.start(
        tmp_path,
        changes=changes,
        reference_optimizer=lambda named: torch.optim.AdamW(named.values(), lr=0.1),
        arguments=lambda model: {"optimizer": _Looking(model.parameters(), lr=0.1)},
    ) as both:
        _Looking.seen.clear()  # of the probe
        for step in range(3):
            batch = both.batch(step)
            both.reference.backward(both.reference.forward(batch))
            both.reference.step()
            both.engine.backward(loss_of(both.engine(**batch)))
            with _OWN_SETTINGS[setting]():
                before = _settings()
                both.engine.step()
                both.engine.flush()
                assert _settings() == before
        both.require_equal()
    of_workers = {seen for thread, seen in _Looking.seen if thread.startswith("infinity-update-")}
    assert of_workers == {(False, False, False, torch.device("cpu"))}
