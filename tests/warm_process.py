"""Runs scripts in forks of one process that has imported torch and the libraries: the imports take longer than most scripts."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_SERVER = """
import contextlib, importlib, json, os, runpy, sys, tempfile, traceback
for library in ("torch", "infinity", "transformers.trainer", "peft", "lightning"):
    with contextlib.suppress(ImportError):
        importlib.import_module(library)
for line in sys.stdin:
    script, words, directory, environment, printed = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(directory)
            os.environ.update(environment)
            tempfile.tempdir = None
            file = os.open(printed, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.argv = [script, *words]
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # the imported libraries take seconds to end
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    sockets = tempfile.TemporaryDirectory()  # Ray names sockets here, and their paths must be short
    child = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=os.environ
        | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        | {"RAY_TMPDIR": sockets.name, "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=30)
        child.kill()
        sockets.cleanup()

    atexit.register(end)
    return child


def run_script(
    script: Path, directory: Path, environment: dict[str, str] | None = None, words: Sequence[str] = ()
) -> tuple[int, str]:
    """Run a Python file in a directory, with words behind its name.

    Returns:
        The exit status, and everything that was printed.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as outside:
        printed = Path(outside, "printed")
        server.stdin.write(json.dumps([str(script), words, str(directory), environment or {}, str(printed)]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return status, printed.read_text()
