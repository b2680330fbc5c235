"""``engine.save_checkpoint(..., blocking=False)``: what is saved is the step of the call, whatever happens meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import CheckpointError, StorageError
from tests.children import run_python
from tests.exactness.lockstep import BF16, IN_MEMORY
from tests.integration.test_checkpoints import steps_of, training
from tests.internals import BackgroundSave, Checkpoint, Saving
from tests.waiting import wait_until

_MODES: dict[str, dict[str, Any]] = {
    "in backward": BF16,
    "after it": {**BF16, "infinity": {"update": "step"}},
    "deferred": {**BF16, "gradient_clipping": 0.1},
    "fp32": {},
    "in memory": {**BF16, **IN_MEMORY},
    "vertical": {**BF16, "gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}},
}


class _Held:
    """Saves in the background begin only when somebody waits for a unit, or `let_go` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begin = threading.Event()
        self.asked: list[int] = []
        run, wait_for = Saving.run, Saving.wait_for

        def held(saving: Saving) -> None:
            if threading.current_thread() is not threading.main_thread():
                self._begin.wait(60)
            run(saving)

        def noted(saving: Saving, unit: Any, timeout_seconds: float | None = None) -> bool:
            self.asked.append(unit.index)
            self.let_go()
            return wait_for(saving, unit, timeout_seconds)

        monkeypatch.setattr(Saving, "run", held)
        monkeypatch.setattr(Saving, "wait_for", noted)

    def let_go(self) -> None:
        self._begin.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> _Held:
    return _Held(monkeypatch)


def _contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.deep
@pytest.mark.parametrize("mode", _MODES)
def test_what_is_saved_is_the_step_of_the_call(mode: str, held: _Held, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with training(tmp_path / "drive", _MODES[mode]) as engine:
        steps_of(engine, 0, 1)
        engine.save_checkpoint(saved, tag="at once")
        engine.save_checkpoint(saved, tag="meanwhile", blocking=False)
        assert (saved / "latest").read_text() == "at once"
        losses = steps_of(engine, 2, 3)
        engine.wait_for_checkpoint()
        assert held.asked, "no update has asked"
        assert (saved / "latest").read_text() == "meanwhile"
        assert Checkpoint.open(saved).verify()
        assert _contents(saved / "meanwhile") == _contents(saved / "at once")
        engine.load_checkpoint(saved)
        assert steps_of(engine, 2, 3) == losses


@pytest.mark.deep
def test_a_script_that_changes_weights_or_states_waits(held: _Held, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with training(tmp_path / "drive", BF16) as engine:
        steps_of(engine, 0)
        engine.save_checkpoint(saved, tag="at once")
        engine.save_checkpoint(saved, tag="gathered", blocking=False)
        weight = engine.module.late.weight
        with torch.no_grad(), infinity.GatheredParameters([weight], modifier_rank=0):
            weight.mul_(2)
        engine.wait_for_checkpoint()
        assert _contents(saved / "gathered") == _contents(saved / "at once")
        engine.load_checkpoint(saved, tag="at once")
        engine.save_checkpoint(saved, tag="written", blocking=False)
        engine.module.late.weight.data.mul_(2)
        for parameter in engine.module.parameters():
            if "exp_avg" in engine.optimizer.state.get(parameter, ()):
                engine.optimizer.state[parameter]["exp_avg"] = torch.ones(parameter.shape)
        engine.flush()
        engine.wait_for_checkpoint()
        assert _contents(saved / "written") == _contents(saved / "at once")


def test_writes_to_weights_in_memory_are_found(held: _Held, tmp_path: Path) -> None:
    with training(tmp_path / "drive", {**BF16, **IN_MEMORY}) as engine:
        steps_of(engine, 0)
        engine.save_checkpoint(tmp_path / "saved", tag="before")
        engine.save_checkpoint(tmp_path / "saved", tag="new", blocking=False)
        engine.module.late.weight.data.mul_(2)
        held.let_go()
        with pytest.raises(CheckpointError, match=r"written to by the script.*blocking=True"):
            engine.wait_for_checkpoint()
        steps_of(engine, 1)
        assert (tmp_path / "saved" / "latest").read_text() == "before"
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["before", "latest"]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("where", ["wait", "step", "save", "load", "close"])
def test_what_fails_is_raised_by_the_next_call(
    where: str, held: _Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    main = threading.main_thread()
    pwrite = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if threading.current_thread() is not main and b"saved" in os.readlink(f"/proc/self/fd/{descriptor}").encode():
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    def act(engine: Any) -> None:
        if where == "step":
            steps_of(engine, 1)
            wait_until(lambda: engine._saving.is_over)
            steps_of(engine, 2)
            return
        held.let_go()
        calls: dict[str, Callable[[], Any]] = {
            "wait": engine.wait_for_checkpoint,
            "save": lambda: engine.save_checkpoint(saved, tag="another"),
            "load": lambda: engine.load_checkpoint(saved, tag="before"),
            "close": engine.close,
        }
        calls[where]()

    with (
        pytest.raises(StorageError, match=r"No space left.*Give a directory"),
        training(tmp_path / "drive", BF16) as engine,
    ):
        steps_of(engine, 0)
        engine.save_checkpoint(saved, tag="before")
        engine.save_checkpoint(saved, tag="new", blocking=False)
        monkeypatch.setattr(os, "pwrite", full)
        act(engine)
    assert (saved / "latest").read_text() == "before"
    assert sorted(path.name for path in saved.iterdir()) == ["before", "latest"]
    assert Checkpoint.open(saved).verify()


@pytest.mark.deep
def test_a_save_that_fails_cuts_no_step_off(held: _Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(saving: Saving) -> None:
        raise OSError(28, "No space left on device")

    with training(tmp_path / "one", BF16) as engine, training(tmp_path / "two", BF16) as other:
        steps_of(engine, 0), steps_of(other, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Saving, "run", fails)
            engine.save_checkpoint(tmp_path / "saved", blocking=False)
            wait_until(lambda: engine._saving.is_over)
        with pytest.raises(OSError, match="No space left"):
            steps_of(engine, 1)
        steps_of(other, 1)
        assert steps_of(engine, 2, 3) == steps_of(other, 2, 3)
        engine.save_checkpoint(tmp_path / "saved")


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("fails", [False, True])
def test_a_save_is_waited_for_where_an_exception_ends_the_engine(
    fails: bool, held: _Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = BackgroundSave.wait

    def let_go_and_wait(background: BackgroundSave) -> None:
        if fails:
            monkeypatch.setattr(Saving, "_in_turn", lambda saving: iter([None]))
        held.let_go()
        wait(background)

    monkeypatch.setattr(BackgroundSave, "wait", let_go_and_wait)
    with pytest.raises(AttributeError if fails else KeyError) as raised, training(tmp_path / "drive", BF16) as engine:
        steps_of(engine, 0)
        engine.save_checkpoint(tmp_path / "saved", blocking=False)
        raise KeyError("of the script")
    if fails:
        assert isinstance(raised.value.__context__, KeyError)
    else:
        assert Checkpoint.open(tmp_path / "saved").verify()


_ENDING = """
import atexit, os, sys
from collections.abc import Callable
from pathlib import Path
def save():
    try:
        engine.save_checkpoint("saved")
    except Exception as error:
        print(type(error).__name__, error)
if sys.argv[1] == "too early":
    atexit.register(save)
from infinity import initialize
from tests.exactness.lockstep import everything_on_nvme
from tests.integration.test_checkpoints import Model, steps_of
if __name__ == "__main__":
    Path("drive").mkdir()
    if sys.argv[1] == "before":
        atexit.register(save)
    engine, *_ = initialize(model=Model(), config=everything_on_nvme(Path("drive").absolute()))
    steps_of(engine, 0)
    if sys.argv[1] == "meanwhile":
        engine.save_checkpoint("saved", blocking=False)
        os.chdir("/")
"""


@pytest.mark.deep
@pytest.mark.parametrize("when", ["too early", "before", "meanwhile"])
def test_a_script_that_just_ends_has_saved_or_says_why_not(when: str, tmp_path: Path) -> None:
    ended = run_python("-c", _ENDING, when, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    if when == "too early":  # a hook that comes after the engine's own end
        assert ended.stdout.startswith("EngineClosedError this call: the interpreter is shutting down")
        assert not (tmp_path / "saved").exists()
    else:
        assert ended.stdout == ""
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["global_step1", "latest"]
        assert Checkpoint.open(tmp_path / "saved").verify()


@pytest.mark.deep
def test_older_checkpoints_go_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "saved"
    (saved / "mine").mkdir(parents=True)
    (saved / "mine" / "manifest.json").write_text("{}")
    (saved / "notes").write_text("mine")

    def names() -> list[str]:
        return sorted(path.name for path in saved.iterdir() if path.name.startswith("t"))

    with training(tmp_path / "drive", BF16) as engine:
        steps_of(engine, 0)
        for tag in ("t1", "t2", "t3"):
            with monkeypatch.context() as patched:
                if tag == "t1":  # and then somebody sets the clock right
                    in_an_hour = time.time_ns() + 3600 * 10**9
                    patched.setattr(time, "time_ns", lambda now=in_an_hour: now)
                engine.save_checkpoint(saved, tag=tag)
        for number, tag in enumerate(("t3", "t2", "t1")):  # a copy without the files' times
            os.utime(saved / tag / "manifest.json", (number, number))
        engine.save_checkpoint(saved, tag="t4", keep_last=3)
        assert names() == ["t2", "t3", "t4"]
        engine.save_checkpoint(saved, tag="t5", keep_last=2, save_latest=False)
        assert names() == ["t4", "t5"]
        engine.save_checkpoint(saved, tag="t6", keep_last=1, save_latest=False)
        assert names() == ["t4", "t6"]  # what `latest` names stays
        engine.save_checkpoint(saved, tag="t6", keep_last=2, blocking=False)
        engine.wait_for_checkpoint()
        assert names() == ["t4", "t6"] and (saved / "latest").read_text() == "t6"
        with pytest.raises(ValueError, match="1 or more"):
            engine.save_checkpoint(saved, tag="t7", keep_last=0)
    assert (saved / "mine" / "manifest.json").is_file() and (saved / "notes").is_file()
    assert not [path for path in saved.iterdir() if path.name.startswith(".")]
