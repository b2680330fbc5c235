#!/usr/bin/env python3
"""The whole life of a model that does not fit into memory, inside a memory limit: build, train, die, resume, export, load.

    bash tools/demo.sh --larger-than-ram                      # 3B parameters, or as many as the disk has room for, in 2 GB
    python tools/larger_than_ram.py --layers 8 --nvme-path /mnt/nvme

A Llama is built by `infinity.Init`, trained for three steps, saved as a checkpoint, trained on, and killed (-9) in the
middle of a step. A new process resumes from the checkpoint, and has to come to the same bits: losses, norms of the gradients
and checksums of all weights. It exports the model for Hugging Face; a third process loads that, tensor by tensor, and has to
give the same loss and the same checksum. All three run in one memory control group (needs root, or a
delegated group of version 2); without one the limit is only compared with the measured peaks. Exit code: 0 if all was equal
and within the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see train.py

import torch
from bench.cgroup import Cgroup, why_unavailable
from rich.table import Table
from train import SIZES, build_model, console, read_text, resident_bytes
from transformers import LlamaForCausalLM

import infinity

SIZE = SIZES["3b"]
STEPS_BEFORE, STEPS_AFTER = 3, 2
"""Steps before the checkpoint, and steps between it and the kill."""
BYTES_PER_PARAMETER = 32
"""On the disk: weights, remainders and moments 12, waiting gradients 4, the checkpoint 14, the export 2."""


# ---------------------------------------------------------------------------------------------------------- processes


def make_model(num_layers: int) -> LlamaForCausalLM:
    """The model of `train.py --model 3b`, with so many layers."""
    return build_model(dataclasses.replace(SIZE, num_layers=num_layers), SIZE.seq_len, torch.bfloat16, "none")


def count_parameters(num_layers: int) -> int:
    """Count parameters without memory for them."""
    # Meta tensors have shapes and no memory.
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(num_layers).parameters())


def engine_config(arguments: argparse.Namespace, *, is_trained: bool = True) -> dict[str, Any]:
    """A DeepSpeed-style config: everything on the drive."""
    tier = {"device": "nvme", "nvme_path": str(arguments.nvme_path)}
    training = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "gradient_clipping": 1.0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
        "infinity": {"host_memory_budget": arguments.host_memory_budget},
        **(training if is_trained else {}),
    }


class Notes:
    """Messages of a process to its parent: lines of JSON in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **facts: Any) -> None:
        # Opened and closed for each line: the process is killed with -9, and a buffer would be lost.
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the notes of one kind."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [facts for facts in map(json.loads, lines) if facts["kind"] == kind]


@contextmanager
def part(notes: Notes, what: str) -> Iterator[None]:
    """Show what is being done, and note how long it took."""
    began = time.perf_counter()
    with console.status(what):
        yield
    seconds = time.perf_counter() - began
    notes.write(kind="part", what=what, seconds=seconds, peak=resident_bytes("VmHWM"))
    console.print(f"  {what:<34}{seconds:8.1f} s   resident now {resident_bytes('VmRSS') / 1e6:7,.0f} MB")


def built(notes: Notes, arguments: argparse.Namespace) -> infinity.Engine:
    """Return an engine, whose weights were written to the drive as they were made."""
    torch.manual_seed(0)
    config = engine_config(arguments)
    with part(notes, "build (infinity.Init)"), infinity.Init(config_dict_or_path=config):
        model = make_model(arguments.layers)
    with part(notes, "initialize"):
        return infinity.initialize(model=model, config=config)[0]


def pieces(arguments: argparse.Namespace) -> torch.Tensor:
    """Return the text in pieces, one for each step."""
    text = read_text(None)
    return text[: len(text) // arguments.seq_len * arguments.seq_len].view(-1, arguments.seq_len)


def batch_of(text: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
    """Return the batch of a step: its own piece of the text."""
    tokens = text[step : step + 1].long()
    return {"input_ids": tokens, "labels": tokens}


def run_step(engine: infinity.Engine, notes: Notes, text: torch.Tensor, step: int) -> None:
    """Make one step, with a note at its beginning and at its end."""
    with part(notes, f"step {step + 1}"):
        # The parent waits for this line, and kills the process within the step.
        notes.write(kind="begun", step=step)
        loss = engine(**batch_of(text, step)).loss
        engine.backward(loss)
        engine.step()
    norm = float(engine.get_global_grad_norm())
    # `hex` keeps every bit of a float.
    notes.write(kind="step", step=step, loss=float(loss.detach()).hex(), norm=norm.hex())


def checksum(engine: infinity.Engine, notes: Notes) -> None:
    """Note one checksum of all weights."""
    found = 0
    with part(notes, "checksum of all weights"), torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            found = zlib.crc32(name.encode(), found)
            # Weights rest on the drive: `clone` fetches one at a time.
            found = zlib.crc32(parameter.clone().reshape(-1).view(torch.uint8).numpy(), found)
    notes.write(kind="checksum", value=f"{found:08x}")


def first_process(arguments: argparse.Namespace, notes: Notes) -> None:
    """Builds, trains, saves, and goes on until it is killed."""
    text = pieces(arguments)
    with built(notes, arguments) as engine:
        for step in range(STEPS_BEFORE):
            run_step(engine, notes, text, step)
        with part(notes, "save_checkpoint"):
            engine.save_checkpoint(arguments.directory / "checkpoints")
        for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            run_step(engine, notes, text, step)
        checksum(engine, notes)
        # Goes on until the parent kills it.
        for step in range(STEPS_BEFORE + STEPS_AFTER, 1000):
            run_step(engine, notes, text, step)


def second_process(arguments: argparse.Namespace, notes: Notes) -> None:
    """Resumes from the checkpoint, and exports."""
    text = pieces(arguments)
    with built(notes, arguments) as engine:
        with part(notes, "load_checkpoint"):
            path, _ = engine.load_checkpoint(arguments.directory / "checkpoints")
        if path is None or engine.global_steps != STEPS_BEFORE:
            raise SystemExit(f"resumed from {path} at step {engine.global_steps}, not at {STEPS_BEFORE}")
        for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
            run_step(engine, notes, text, step)
        checksum(engine, notes)
        with part(notes, "save_pretrained"):
            engine.save_pretrained(arguments.directory / "exported")
        evaluate(engine, notes, text)
        # Restoring would bring all weights into memory, where they do not fit.
        engine.close(restore_weights=False)


def third_process(arguments: argparse.Namespace, notes: Notes) -> None:
    """Loads what was exported."""
    text = pieces(arguments)
    config = engine_config(arguments, is_trained=False)
    with part(notes, "load_pretrained"):
        model = infinity.load_pretrained(LlamaForCausalLM, arguments.directory / "exported", config=config)
    with infinity.initialize(model=model, config=config)[0] as engine:
        checksum(engine, notes)
        evaluate(engine, notes, text)
        engine.close(restore_weights=False)


def evaluate(engine: infinity.Engine, notes: Notes, text: torch.Tensor) -> None:
    """Note the loss of one more batch."""
    with part(notes, "evaluate"), torch.no_grad():
        engine.eval()
        loss = engine(**batch_of(text, 100)).loss
    notes.write(kind="loss", value=float(loss).hex())


PROCESSES = {"train": first_process, "resume": second_process, "load": third_process}


# ------------------------------------------------------------------------------------------------------ the one above


def choose_layers(arguments: argparse.Namespace) -> int:
    """Return the number of layers that were asked for or that fit on the disk; print if these are fewer."""
    whole = count_parameters(SIZE.num_layers)
    # Parameters of one layer; embeddings and head are the rest.
    of_one = (whole - count_parameters(0)) // SIZE.num_layers
    if arguments.layers is not None:
        return int(arguments.layers)
    free = shutil.disk_usage(arguments.nvme_path).free
    # Leaves a tenth of the disk free.
    fitting = int(free * 0.9 / BYTES_PER_PARAMETER / of_one)
    if fitting < 1:
        raise SystemExit(f"{arguments.nvme_path} has {free / 1e9:.1f} GB free: not enough for one layer")
    if fitting < SIZE.num_layers:
        console.print(
            f"{whole / 1e9:.1f}B parameters need {whole * BYTES_PER_PARAMETER / 1e9:.0f} GB of disk, and {arguments.nvme_path} "
            f"has {free / 1e9:.0f} GB free: {fitting} of {SIZE.num_layers} layers are made.",
            soft_wrap=True,
        )
    return min(fitting, SIZE.num_layers)


def start(arguments: argparse.Namespace, name: str, group: Cgroup) -> subprocess.Popen[bytes]:
    """Start a process that is in the group from its first instruction."""
    own = [__file__, "--process", name, "--directory", str(arguments.directory), "--layers", str(arguments.layers)]
    own += ["--seq-len", str(arguments.seq_len)]
    own += ["--nvme-path", str(arguments.nvme_path), "--host-memory-budget", arguments.host_memory_budget]
    return subprocess.Popen(group.command(sys.executable, *own))


def kill_in_a_step(process: subprocess.Popen[bytes], notes: Notes) -> None:
    """Wait for the last of the steps that are compared, and kill the process somewhere in the next one."""
    last = STEPS_BEFORE + STEPS_AFTER
    while process.poll() is None:
        if any(facts["step"] == last for facts in notes.of("begun")):
            seconds = [facts["seconds"] for facts in notes.of("part") if facts["what"].startswith("step")]
            # Somewhere in the step: between a tenth and nine tenths of the shortest one.
            time.sleep(random.uniform(0.1, 0.9) * min(seconds))
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.05)
    raise SystemExit(f"the training ended by itself, with exit code {process.returncode}")


def run(arguments: argparse.Namespace, group: Cgroup) -> bool:
    """Run all processes, print the comparison, and return whether all was equal and within the limit."""
    table = Table("", "first", "then", "", title="Compared")
    memory = group.memory if group.memory is not None and group.memory.has_peak else None
    peaks = Table("process", "peak" if memory is None else "peak of the group", title="Memory")
    is_right = True
    notes: dict[str, Notes] = {}
    for name in PROCESSES:
        notes[name] = Notes(arguments.directory / f"{name}.jsonl")
        console.rule(name)
        # The peak of each process by itself. Without a reset, the largest so far would be shown for all that follow.
        counts_group = memory is not None and memory.reset_peak()
        process = start(arguments, name, group)
        try:
            if name == "train":
                kill_in_a_step(process, notes[name])
                console.print("killed with -9 in the middle of a step")
            elif process.wait():
                raise SystemExit(f"process '{name}' ended with exit code {process.returncode}")
        finally:
            process.kill()
            process.wait()
        own_peaks = (facts["peak"] for facts in notes[name].of("part"))
        peak = memory.peak_bytes if memory is not None and counts_group else max(own_peaks)
        peaks.add_row(name, f"{peak / 1e6:,.0f} MB")
        is_right &= peak <= arguments.limit
    trained, resumed, loaded = notes["train"], notes["resume"], notes["load"]
    before = {facts["step"]: facts for facts in trained.of("step")}
    pairs = [
        (f"step {facts['step'] + 1}: {what}", before[facts["step"]][what], facts[what])
        for facts in resumed.of("step")
        for what in ("loss", "norm")
    ]
    pairs += [
        (what, first.of(kind)[0]["value"], then.of(kind)[0]["value"])
        for what, kind, first, then in (
            ("checksum of the weights", "checksum", trained, resumed),
            ("exported and loaded: weights", "checksum", resumed, loaded),
            ("exported and loaded: a loss", "loss", resumed, loaded),
        )
    ]
    for what, first, then in pairs:
        table.add_row(what, first, then, "equal" if first == then else "DIFFERENT")
        is_right &= first == then
    console.print(table)
    console.print(peaks)
    return is_right


def main() -> int:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--larger-than-ram", action="store_true", help="how tools/demo.sh chooses this script")
    add("--layers", type=int, help=f"of {SIZE.num_layers}, 0.1B parameters each (default: as many as the disk holds)")
    add("--seq-len", type=int, default=128, help="tokens of a step (default: 128)")
    add("--limit", type=int, default=2_000_000_000, help="bytes of memory for all (default: 2 GB)")
    add("--host-memory-budget", default="1GB", help="the engine's part of it (default: 1GB)")
    add("--nvme-path", type=Path, default=Path("nvme"), help="directory on the drive (default: ./nvme)")
    add("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    add("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is not None:
        PROCESSES[arguments.process](arguments, Notes(arguments.directory / f"{arguments.process}.jsonl"))
        return 0
    arguments.nvme_path = arguments.nvme_path.resolve()
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    arguments.layers = choose_layers(arguments)
    number = count_parameters(arguments.layers)
    console.print(
        f"{number / 1e9:.2f}B parameters: training them takes {number * 12 / 1e9:.1f} GB of states, "
        f"and there are {arguments.limit / 1e9:.1f} GB of memory."
    )
    reason = why_unavailable("memory")
    if reason is not None:
        console.print(f"No memory limit: {reason}. What is measured is each process's own peak.", soft_wrap=True)
    with (
        tempfile.TemporaryDirectory(dir=arguments.nvme_path) as directory,
        Cgroup("larger", ("memory",) if reason is None else ()) as group,
    ):
        arguments.directory = Path(directory)
        if group.memory is not None:
            group.memory.limit(arguments.limit)
        is_right = run(arguments, group)
    console.print("All equal." if is_right else "NOT all right: see the tables.", style="green" if is_right else "red")
    return 0 if is_right else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files and processes go
    sys.exit(main())
