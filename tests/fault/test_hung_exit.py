"""A drive that hangs does not keep the process, nor whoever leaves an engine by an exception or drops it."""

from __future__ import annotations

import gc
import json
import logging
import os
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_python
from tests.exactness.lockstep import PLAIN, engine_on_nvme, make_batch, take_steps
from tests.internals import wait_for_collected
from tests.waiting import wait_until

_DEADLINE_SECONDS = 10_000
_TIMEOUT_SECONDS = 400.0  # far below that, and far above what a busy machine needs
_CHANGES = {"infinity": {"update": "in_backward", "io_deadline_seconds": _DEADLINE_SECONDS, "io_backend": "threads"}}


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Set by the test: writes hang from now on. Set by the first that does."""
    hangs, has_hung, may_go, real = threading.Event(), threading.Event(), threading.Event(), os.pwritev

    def pwritev(*arguments: Any) -> int:
        if hangs.is_set():
            has_hung.set()
            may_go.wait()
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    yield hangs, has_hung
    may_go.set()


def _hanging_engine(directory: Path, hung: tuple[threading.Event, threading.Event]) -> Any:
    hangs, has_hung = hung
    engine = engine_on_nvme(directory, PLAIN.make("none"), _CHANGES)
    take_steps(engine, 0, 1)
    engine.flush()
    loss = engine(**make_batch(2))
    hangs.set()
    engine.backward(loss)  # its updates go on in the background
    assert has_hung.wait(_TIMEOUT_SECONDS)
    return engine


def test_leaving_by_an_exception_does_not_wait_for_a_hung_drive(
    tmp_path: Path, hung: tuple[threading.Event, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    engine = _hanging_engine(tmp_path, hung)
    with pytest.raises(ZeroDivisionError), caplog.at_level(logging.ERROR), engine:
        raise ZeroDivisionError
    assert "closed while transfers hang" in caplog.text
    assert str(tmp_path) in caplog.text


def test_a_dropped_engine_does_not_wait_for_a_hung_drive(
    tmp_path: Path, hung: tuple[threading.Event, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    engine = _hanging_engine(tmp_path, hung)
    with caplog.at_level(logging.ERROR):
        del engine

        def is_closed() -> bool:
            gc.collect()  # again and again: for a moment another thread may hold what belongs to the engine
            wait_for_collected()
            return "closed while transfers hang" in caplog.text

        wait_until(is_closed)
    wait_until(lambda: not any(each.name in ("infinity-update", "infinity-reaper") for each in threading.enumerate()))


_CODE = """
    import logging, os, sys, threading, torch
    logging.basicConfig(level=logging.WARNING)
    import infinity
    torch.set_num_threads(1)
    nvme = {"device": "nvme", "nvme_path": sys.argv[1]}
    engine, *_ = infinity.initialize(
        model=torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))),
        config={
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
            "infinity": {"host_memory_budget": "64MiB", "staging_buffer_bytes": 49152, "keep_in_memory": False, "io_backend":
            "threads",
                         "update": "in_backward", "io_deadline_seconds": DEADLINE,
                         "timeline": sys.argv[1] + "/timeline.json"},
        },
    )
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 64)).sum())
        engine.step()
    engine.flush()
    loss = engine(torch.ones(4, 64)).sum()
    is_hung = threading.Event()
    def hanging(*arguments):
        is_hung.set()
        threading.Event().wait()
    os.pwritev = hanging
    engine.backward(loss)
    is_hung.wait()
    sys.exit(7)
"""


@pytest.mark.deep
def test_a_hung_drive_does_not_keep_the_process(tmp_path: Path) -> None:
    source = textwrap.dedent(_CODE).replace("DEADLINE", str(_DEADLINE_SECONDS))
    answer = run_python("-c", source, tmp_path, timeout_seconds=_TIMEOUT_SECONDS)
    assert answer.returncode == 7, answer.stderr
    assert "closed while transfers hang" in answer.stderr and str(tmp_path) in answer.stderr
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"], "what can be written still is"
