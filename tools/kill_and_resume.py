#!/usr/bin/env python3
"""Kills a training (-9) in the middle of a step, starts it again, and compares the weights with an uninterrupted run's.

    bash tools/demo.sh                                   # its second half
    python tools/kill_and_resume.py --model tiny         # arguments are those of tools/train.py

The first five steps of `tools/train.py` run three times: without a kill; in a process that is killed in step 4; in a process
with the same command, which continues from the last step that was committed (`"infinity": {"durable": true}`). Exit code: 0 if
the weights have the same SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see train.py

import torch
import train

import infinity
from infinity.errors import InfinityError

NUM_STEPS, KILLED_IN = 5, 4
"""Steps of each run, and in which of them it is killed, counted from 1."""


def run_steps(engine: infinity.Engine, loader: Any, notes: Path | None) -> float:
    """Train until `NUM_STEPS`; returns how long the last step took. ``notes``: gets a line when a step begins."""
    seconds = 0.0
    for batch in loader:
        if engine.global_steps == NUM_STEPS:
            break
        if notes is not None and engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            with notes.open("a") as file:
                file.write(f"{engine.global_steps + 1}\n")
        began = time.perf_counter()
        engine.backward(engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss)
        engine.step()
        seconds = time.perf_counter() - began
    return seconds


def sha_of(engine: infinity.Engine) -> str:
    """SHA-256 of all weights, with their names."""
    found = hashlib.sha256()
    for name, weight in engine.iter_weights():
        found.update(name.encode())
        found.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def be_the_process(arguments: argparse.Namespace, folder: Path) -> None:
    """Train durably: begin, or continue where an earlier process was killed."""
    durable = {"infinity.durable": True, "infinity.durable_path": str(folder / "run")}
    engine, loader, _ = train.make_engine(arguments, train.read_text(arguments.text), durable)
    with engine:
        first = engine.global_steps
        run_steps(engine, loader, folder / "steps")
        (folder / "result.json").write_text(json.dumps({"first": first, "sha": sha_of(engine)}))


def kill_in_a_step(process: subprocess.Popen[bytes], notes: Path, seconds: float) -> None:
    """Wait until the step begins, and kill the process within ``seconds``."""
    while process.poll() is None:
        if notes.exists() and str(KILLED_IN) in notes.read_text().split():
            time.sleep(random.uniform(0.1, 0.9) * seconds)
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.02)
    raise InfinityError(f"the training ended by itself, with exit code {process.returncode}")


def compare(arguments: argparse.Namespace, given: Sequence[str]) -> bool:
    """All three runs; whether the weights are equal."""
    say = train.console.print
    say(f"\nKill and resume: {NUM_STEPS} steps without a kill ...")
    engine, loader, _ = train.make_engine(arguments, train.read_text(arguments.text))
    with engine:
        seconds = run_steps(engine, loader, None)
        expected = sha_of(engine)
        engine.close(restore_weights=False)
    with tempfile.TemporaryDirectory(dir=arguments.nvme_path or ".") as directory:
        folder = Path(directory)
        command = [sys.executable, __file__, "--process", directory, *given]
        say(f"... the same in a process that is killed with -9 in step {KILLED_IN} ...")
        process = subprocess.Popen(command)
        try:
            kill_in_a_step(process, folder / "steps", seconds)
        finally:
            process.kill()
            process.wait()
        say("... and the same command again, which continues.")
        subprocess.run(command, check=True)
        result = json.loads((folder / "result.json").read_text())
    is_equal = result["sha"] == expected
    say(
        f"Killed in step {KILLED_IN}, resumed after step {result['first']}. After step {NUM_STEPS} the weights are "
        + (f"equal: sha256 {expected[:16]}" if is_equal else f"NOT equal: {expected[:16]} and {result['sha'][:16]}"),
        style="green" if is_equal else "red",
        soft_wrap=True,
    )
    return is_equal


def main(given: Sequence[str]) -> int:
    """Be one of the processes, or start them."""
    if given[:1] == ["--process"]:
        be_the_process(train.parse_arguments(given[2:]), Path(given[1]))
        return 0
    if {"-h", "--help"} & {*given}:
        print(__doc__)
    arguments = train.parse_arguments(given)
    if arguments.steps < NUM_STEPS:
        raise InfinityError(f"--steps {arguments.steps}: a run has at least {NUM_STEPS}")
    return 0 if compare(arguments, given) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InfinityError as error:
        sys.exit(f"{type(error).__name__}: {error}")
