"""Ctrl-C while libraries are imported: a command ends at once and says nothing; a script gets its exception."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

_SLOW_LIBRARY = "import time\nprint('importing', flush=True)\ntime.sleep(600)"


@pytest.mark.parametrize("way", ["module", "command", "script"])
def test_an_interrupt_during_imports(way: str, tmp_path: Path) -> None:
    (tmp_path / "libraries" / "torch").mkdir(parents=True)
    (tmp_path / "libraries" / "torch" / "__init__.py").write_text(_SLOW_LIBRARY)
    script = tmp_path / ("infinity" if way == "command" else "train.py")
    script.write_text("from infinity.cli.main import main\nmain()\n")
    root = Path(infinity.__file__).parents[1]
    path = os.pathsep.join([str(tmp_path / "libraries"), str(root)])
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # where it is ignored here, it would be ignored there
    started = subprocess.Popen(
        [sys.executable, *(["-m", "infinity"] if way == "module" else [str(script)]), "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    signal.signal(signal.SIGINT, before)
    assert started.stdout is not None and started.stdout.readline() == "importing\n"
    started.send_signal(signal.SIGINT)
    _, told = started.communicate()
    assert started.returncode == -signal.SIGINT
    assert ("KeyboardInterrupt" in told) == (way == "script") and (told == "") == (way != "script")


@pytest.mark.parametrize("wanted", [None, "active"])
def test_the_demo_trains_with_threads_that_sleep_while_they_wait(wanted: str | None) -> None:
    """On a busy machine, those that spin make a step ten times as long. A user's own setting stays."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": wanted} if wanted else {})
    command = [sys.executable, "-m", "infinity", "train", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, env=environment).stderr
    assert f"OMP_WAIT_POLICY = '{(wanted or 'passive').upper()}'" in told


def test_another_system_is_told() -> None:
    code = "import sys; sys.platform = 'win32'; import infinity"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1].startswith("ImportError: infinity needs Linux, and this is win32. Use")
