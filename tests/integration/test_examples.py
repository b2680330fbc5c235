"""The examples of tools/examples run as they stand, and say what they claim."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "tools" / "examples"

_PRINTS = {
    "own_module": ["host memory budget +6.0 MB", "losses equal: True", "weights equal: True"],
    "lora": ["trainable params: 16,384 ", r"adapters saved to \./adapters", r"merged model saved to \./merged"],
    "micro_batches": [r"The vertical schedule read [3-9]\.\d times less\."],
    "resume": ["killed by signal 9", "again:\n  begins at step [45]\n", "weights equal: True"],
    "generate": ["tokens equal: True"],
    "hf_trainer": [r"step 8: loss (\d\.\d+) with the engine, \1 without", "losses equal: True"],
    "lightning_classifier": [r"accuracy: 0\.[6-9]\d \(guessing: 0\.25\)"],
    "ray_train": ["killed and begun again: True", "weights equal: True"],
    "two_processes": ["rank 0 of 2: loss", "rank 1 of 2: loss", "weights equal on both: True"],
}
"""What each has to print, as patterns."""
_SLOWER = {"ray_train": pytest.mark.timeout(1800)}
"""Beside 18 busy processes on two processors, Ray takes 13 minutes until it begins to train."""
_LEAVES = {
    "lora": {"adapters", "merged"},
    "resume": {"run-killed", "run-whole"},
    "generate": {"weights"},
    "hf_trainer": {"model", "plain", "paged"},
    "ray_train": {"checkpoints", "drive", "killed", "ray", "trained"},
}
"""What each leaves in the directory in which it is started."""

_RUNNING = """
import contextlib, importlib, json, os, runpy, sys, tempfile, traceback
for library in ("torch", "infinity", "transformers.trainer", "peft", "lightning"):
    with contextlib.suppress(ImportError):
        importlib.import_module(library)
for line in sys.stdin:
    script, directory = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        tempfile.tempdir = os.environ["TMPDIR"] = os.path.abspath("..")  # torchrun leaves its logs there
        printed = os.open("../printed", os.O_WRONLY | os.O_CREAT)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        sys.argv = [script]
        status = 1
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # what it has imported takes seconds to end
"""
"""Runs scripts, each in a fork of a process that has imported what they import: that takes longer than any of them."""


@pytest.fixture(scope="module")
def running() -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory() as directory:
        # It names sockets there, which must be short.
        for_ray = {"RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0"}
        child = subprocess.Popen(
            [sys.executable, "-c", _RUNNING],
            env=os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | for_ray,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield child
            child.communicate(timeout=150)
        finally:
            child.kill()
            child.wait()


@pytest.mark.deep
@pytest.mark.timeout(600)  # the first waits for what takes longest, the imports
@pytest.mark.parametrize("name", [pytest.param(name, marks=_SLOWER.get(name, [])) for name in _PRINTS])
def test_it_runs_and_prints_what_it_claims(name: str, running: subprocess.Popen[str], tmp_path: Path) -> None:
    for library in ("peft", "transformers", "lightning", "ray"):
        is_imported = re.search(rf"^(import|from) {library}\b", (_EXAMPLES / f"{name}.py").read_text(), re.MULTILINE)
        if is_imported and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    assert running.stdin is not None and running.stdout is not None
    (tmp_path / "here").mkdir()
    running.stdin.write(json.dumps([str(_EXAMPLES / f"{name}.py"), str(tmp_path / "here")]) + "\n")
    running.stdin.flush()
    status = running.stdout.readline().strip()
    printed = (tmp_path / "printed").read_text()
    assert status == "0", printed
    assert not re.search("equal.*: False", printed), printed
    for pattern in _PRINTS[name]:
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"
    assert {path.name for path in (tmp_path / "here").iterdir()} == _LEAVES.get(name, set())


def test_each_is_run_and_short() -> None:
    scripts = {path.stem: path.read_text().splitlines() for path in _EXAMPLES.glob("*.py")}
    assert scripts.keys() == _PRINTS.keys()
    assert {name: len(lines) for name, lines in scripts.items() if len(lines) >= 80} == {}
