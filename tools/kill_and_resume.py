#!/usr/bin/env python3
"""Kills a training (-9) in the middle of a step, resumes it, exports and loads it, and compares all of that bit for bit.

    bash tools/demo.sh                                   # its second half
    python tools/kill_and_resume.py --model tiny         # other arguments are those of tools/train.py
    bash tools/demo.sh --larger-than-ram                 # 3B parameters, or as many as the disk has room for, in 2 GB

A Llama is built by `infinity.Init`, trained for three steps, saved as a checkpoint, trained on, and killed in the middle of
step 6. A new process resumes from the checkpoint, and has to come to the same bits: losses, norms of the gradients and the
SHA-256 of all weights. It exports the model for Hugging Face; a third process loads that, tensor by tensor, and has to give the
same loss and the same weights. With --larger-than-ram, all three run in one memory control group (needs root, or a delegated
group of version 2); without one the limit is only compared with the measured peaks. Exit code: 0 if all was equal and within
the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see train.py

import torch
import train
from bench.cgroup import Cgroup, why_unavailable
from rich.table import Table
from train import SIZES, console, resident_bytes
from transformers import LlamaForCausalLM

import infinity

SAVED_AFTER, COMPARED_AFTER = 3, 5
"""Steps after which the checkpoint is saved, and after which the weights are compared: the kill comes in the next one."""
BYTES_PER_PARAMETER = 32
"""On the disk: weights, remainders and moments 12, waiting gradients 4, the checkpoint 14, the export 2."""
LARGE = ["--model", "3b", "--seq-len", "128", "--batch-size", "1", "--host-memory-budget", "1GB", "--nvme-path", "nvme"]
"""What --larger-than-ram means to train.py. Options that are given as well come later, and win."""


# ---------------------------------------------------------------------------------------------------------- processes


class Notes:
    """What a process tells its parent: a line of JSON, name and value, for each fact. The last of a name counts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, name: str, value: Any) -> None:
        # Opened and closed for each line: the process is killed with -9, and a buffer would be lost.
        with self._path.open("a") as file:
            file.write(json.dumps([name, value]) + "\n")

    def read(self) -> dict[str, Any]:
        return dict(map(json.loads, self._path.read_text().splitlines())) if self._path.exists() else {}

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Show what is being done, and how long it took."""
        began = time.perf_counter()
        with console.status(what):
            yield
        seconds = time.perf_counter() - began
        self.write(f"seconds of {what}", seconds)
        self.write("peak", resident_bytes("VmHWM"))
        console.print(f"  {what:<34}{seconds:8.1f} s   resident now {resident_bytes('VmRSS') / 1e6:7,.0f} MB")


def run_steps(engine: infinity.Engine, batches: Iterator[Any], notes: Notes, last: int) -> None:
    """Train until step ``last`` has ended."""
    while engine.global_steps < last:
        step = engine.global_steps + 1
        with notes.part(f"step {step}"):
            # The parent waits for this line, and kills the process within the step.
            notes.write("begun", step)
            while engine.global_steps < step:
                loss = engine(**{name: tensor.to(engine.device) for name, tensor in next(batches).items()}).loss
                engine.backward(loss)
                engine.step()
        # `hex` keeps every bit of a float.
        notes.write(f"step {step}: loss", float(loss.detach()).hex())
        notes.write(f"step {step}: norm", float(engine.get_global_grad_norm()).hex())


def look(engine: infinity.Engine, notes: Notes, text: torch.Tensor | None) -> None:
    """Note one checksum of all weights and, with a text, the loss of its beginning."""
    found = hashlib.sha256()
    with notes.part("checksum of all weights"):
        for name, weight in engine.iter_weights():
            found.update(name.encode())
            found.update(weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    notes.write("sha256 of the weights", found.hexdigest()[:16])
    if text is not None:
        tokens = text[None].long().to(engine.device)
        with notes.part("evaluate"), torch.no_grad():
            engine.eval()
            notes.write("loss of the text's beginning", float(engine(input_ids=tokens, labels=tokens).loss).hex())


def train_and_resume(arguments: argparse.Namespace, folder: Path, notes: Notes, *, resumes: bool) -> None:
    """Train, save, and go on until the parent kills this process. Or resume, come to the same weights, and export."""
    text = train.read_text(arguments.text)
    with notes.part("build"):
        engine, loader, _ = train.make_engine(arguments, text, on_drive=True)
    with engine:
        if resumes:
            with notes.part("load_checkpoint"):
                path, _ = engine.load_checkpoint(folder / "checkpoints")
            if path is None or engine.global_steps != SAVED_AFTER:
                raise SystemExit(f"resumed from {path} at step {engine.global_steps}, not at {SAVED_AFTER}")
        batches = iter(loader)
        run_steps(engine, batches, notes, SAVED_AFTER)
        if not resumes:
            with notes.part("save_checkpoint"):
                engine.save_checkpoint(folder / "checkpoints")
        run_steps(engine, batches, notes, COMPARED_AFTER)
        look(engine, notes, text[: arguments.seq_len or SIZES[arguments.model].seq_len] if resumes else None)
        if not resumes:
            run_steps(engine, batches, notes, arguments.steps)
        with notes.part("save_pretrained"):
            engine.save_pretrained(folder / "exported")
        # Restoring would bring all weights into memory, where they may not fit.
        engine.close(restore_weights=False)


def load(arguments: argparse.Namespace, folder: Path, notes: Notes) -> None:
    """Load what was exported."""
    size = SIZES[arguments.model]
    config = train.make_config(arguments, size, {"optimizer": None})
    with notes.part("load_pretrained"):
        model = infinity.load_pretrained(LlamaForCausalLM, folder / "exported", config=config)
    with infinity.initialize(model=model, config=config)[0] as engine:
        look(engine, notes, train.read_text(arguments.text)[: arguments.seq_len or size.seq_len])
        engine.close(restore_weights=False)


PROCESSES = ("train", "resume", "load")


# ------------------------------------------------------------------------------------------------------ the one above


def count_parameters(model: str, num_layers: int) -> int:
    """Count parameters without memory for them."""
    # Meta tensors have shapes and no memory.
    with torch.device("meta"):
        size = dataclasses.replace(SIZES[model], num_layers=num_layers)
        return sum(parameter.numel() for parameter in train.build_model(size, 1, torch.bfloat16, "none").parameters())


def fitting_layers(arguments: argparse.Namespace) -> int:
    """Return the number of layers that fit on the disk; print if they are fewer than the model's."""
    num_layers, place = SIZES[arguments.model].num_layers, arguments.nvme_path
    whole = count_parameters(arguments.model, num_layers)
    # Parameters of one layer; embeddings and head are the rest.
    of_one = (whole - count_parameters(arguments.model, 0)) // num_layers
    free = shutil.disk_usage(place).free
    # Leaves a tenth of the disk free.
    fitting = int(free * 0.9 / BYTES_PER_PARAMETER / of_one)
    if fitting < 1:
        raise SystemExit(f"{place} has {free / 1e9:.1f} GB free: not enough for one layer")
    if fitting < num_layers:
        needed = f"{whole / 1e9:.1f}B parameters need {whole * BYTES_PER_PARAMETER / 1e9:.0f} GB of disk"
        made = f"{fitting} of {num_layers} layers are made"
        console.print(f"{needed}, and {place} has {free / 1e9:.0f} GB free: {made}.", soft_wrap=True)
    return min(fitting, num_layers)


def kill_in_a_step(process: subprocess.Popen[bytes], notes: Notes) -> None:
    """Wait for the last of the steps that are compared, and kill the process somewhere in the next one."""
    while process.poll() is None:
        told = notes.read()
        if told.get("begun", 0) > COMPARED_AFTER:
            # Somewhere in the step: between a tenth and nine tenths of the shortest one.
            shortest = min(value for name, value in told.items() if name.startswith("seconds of step"))
            time.sleep(random.uniform(0.1, 0.9) * shortest)
            process.send_signal(signal.SIGKILL)
            process.wait()
            console.print("killed with -9 in the middle of a step")
            return
        time.sleep(0.05)
    raise SystemExit(f"the training ended by itself, with exit code {process.returncode}")


def run(given: list[str], folder: Path, limit: int | None) -> bool:
    """Run all processes, print the comparison, and return whether all was equal and within the limit."""
    reason = None if limit is None else why_unavailable("memory")
    if reason is not None:
        console.print(f"No memory limit: {reason}. What is measured is each process's own peak.", soft_wrap=True)
    peaks = Table("process", "peak", title="Memory")
    is_right, told = True, {}
    with Cgroup("killed", ("memory",) if limit is not None and reason is None else ()) as group:
        memory = group.memory
        if memory is not None:
            memory.limit(limit)
        for name in PROCESSES:
            notes = Notes(folder / f"{name}.jsonl")
            console.rule(name)
            # The peak of each process by itself. Without a reset, the largest so far would be shown for all that follow.
            counts_group = memory is not None and memory.has_peak and memory.reset_peak()
            # In the group from its first instruction.
            command = group.command(sys.executable, __file__, "--process", name, "--directory", str(folder), *given)
            process = subprocess.Popen(command)
            try:
                if name == "train":
                    kill_in_a_step(process, notes)
                elif process.wait():
                    raise SystemExit(f"process '{name}' ended with exit code {process.returncode}")
            finally:
                process.kill()
                process.wait()
            told[name] = notes.read()
            peak = memory.peak_bytes if memory is not None and counts_group else told[name]["peak"]
            peaks.add_row(name, f"{peak / 1e6:,.0f} MB")
            is_right &= limit is None or peak <= limit
    compared = Table("", "first", "then", "", title="Compared")
    for first, then in itertools.pairwise(PROCESSES):
        names = [name for name in told[then] if name.startswith(("step", "sha", "loss")) and name in told[first]]
        for name in names:
            one, other = told[first][name], told[then][name]
            compared.add_row(f"{first}, {then}: {name}", one, other, "equal" if one == other else "DIFFERENT")
            is_right &= one == other
        is_right &= len(names) > 0
    console.print(compared)
    console.print(peaks)
    return is_right


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False, allow_abbrev=False
    )
    add = parser.add_argument
    add("--larger-than-ram", action="store_true", help="3B parameters, inside a memory limit")
    add("--limit", type=int, default=2_000_000_000, help="then: bytes of memory for all (default: 2 GB)")
    add("--layers", type=int, help="so many in place of the model's own (default then: as many as the disk holds)")
    add("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    add("--directory", type=Path, help=argparse.SUPPRESS)
    own, given = parser.parse_known_args()
    if {"-h", "--help"} & {*given}:
        parser.print_help()
    given = [*(LARGE if own.larger_than_ram else []), *given]
    arguments = train.parse_arguments(given)
    place = Path(arguments.nvme_path or ".")
    if own.larger_than_ram:
        place.mkdir(parents=True, exist_ok=True)
        own.layers = fitting_layers(arguments) if own.layers is None else own.layers
        number = count_parameters(arguments.model, own.layers)
        console.print(
            f"{number / 1e9:.2f}B parameters: training them takes {number * 12 / 1e9:.1f} GB of states, "
            f"and there are {own.limit / 1e9:.1f} GB of memory."
        )
    if own.layers is not None:
        SIZES[arguments.model] = dataclasses.replace(SIZES[arguments.model], num_layers=own.layers)
        given += ["--layers", str(own.layers)]
    if own.process is not None:
        notes = Notes(own.directory / f"{own.process}.jsonl")
        if own.process == "load":
            load(arguments, own.directory, notes)
        else:
            train_and_resume(arguments, own.directory, notes, resumes=own.process == "resume")
        return 0
    if arguments.steps <= COMPARED_AFTER:
        given += ["--steps", str(COMPARED_AFTER + 1)]  # it is killed in that one; of two the last counts
    with tempfile.TemporaryDirectory(dir=place) as directory:
        is_right = run(given, Path(directory), own.limit if own.larger_than_ram else None)
    console.print("All equal." if is_right else "NOT all right: see the tables.", style="green" if is_right else "red")
    return 0 if is_right else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files and processes go
    try:
        sys.exit(main())
    except infinity.InfinityError as error:
        sys.exit(f"{type(error).__name__}: {error}")
