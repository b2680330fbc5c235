"""A measured process: obeys one-line JSON orders on stdin and answers each with one JSON line.

Orders: `{"num_steps": n}` runs n steps and the flush that ends them. The process ends when stdin does. Whatever
libraries print goes to stderr, which the parent keeps as a log: the answers have a descriptor of their own.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from .models import Program, Workload

# Kind -> module and class. Imported when asked for: each environment has the packages of its own program.
_PROGRAMS = {
    "ours": (".ours", "Ours"),
    "in_memory": (".in_memory", "InMemory"),
    "deepspeed": (".deepspeed_peer", "DeepSpeedPeer"),
}


def make_program(kind: str, workload: Workload, settings: dict[str, Any]) -> Program:
    """Builds the program called `kind`."""
    module, name = _PROGRAMS[kind]
    return getattr(importlib.import_module(module, __package__), name)(workload, settings)


def drive_bytes() -> tuple[int, int]:
    """Bytes this process has caused to be read from and written to block devices."""
    # The kernel counts them per process, for block devices alone: tmpfs has none.
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def synchronize() -> None:
    """Wait for the GPU, if there is one: a step's time holds its kernels."""
    # Not imported here: it would count in the memory of a program without it.
    torch = sys.modules.get("torch")  # a program that has none computes nothing there
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def device_peak_bytes() -> int | None:
    """The most that torch has taken of the GPU so far; None without one."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.max_memory_allocated()) if torch is not None and torch.cuda.is_available() else None


def memory_high_water_bytes() -> int:
    """Largest resident size of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def run_turn(program: Program, num_steps: int) -> dict[str, Any]:
    """Runs `num_steps` steps back to back, then the flush, so that no work of this turn is left for later."""
    read_before, written_before = program.moved_bytes() or drive_bytes()
    began = time.perf_counter()
    seconds, losses = [], []
    for _ in range(num_steps):
        step_began = time.perf_counter()
        # A step returns when its loss is known; updates may still run. The flush below ends them.
        losses.append(program.step())
        synchronize()
        seconds.append(time.perf_counter() - step_began)
    flush_began = time.perf_counter()
    program.flush()
    ended = time.perf_counter()
    read_after, written_after = program.moved_bytes() or drive_bytes()
    return {
        "num_steps": num_steps,
        "seconds": seconds,
        "flush_seconds": ended - flush_began,
        "total_seconds": ended - began,
        "read_bytes": read_after - read_before,
        "write_bytes": written_after - written_before,
        "losses": losses,
        "high_water_bytes": memory_high_water_bytes(),
        "device_peak_bytes": device_peak_bytes(),
    }


def _die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies: a killed parent cannot clean up."""
    # PR_SET_PDEATHSIG of <sys/prctl.h>.
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    # The parent died before prctl was called, so the signal would never come.
    if os.getppid() != parent_pid:
        sys.exit("the benchmark has ended already")


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _obey(answers: TextIO, kind: str, workload: Workload, settings: dict[str, Any]) -> None:
    began = time.perf_counter()
    program = make_program(kind, workload, settings)
    ready = {"ready_seconds": time.perf_counter() - began, "high_water_bytes": memory_high_water_bytes()}
    _tell(answers, ready)
    for line in sys.stdin:
        answer = run_turn(program, int(json.loads(line)["num_steps"]))
        answer["description"] = program.describe()
        answer["reports"] = program.take_reports()
        _tell(answers, answer)
    program.close()


def main() -> None:
    """Entry point, which `_START` of the parent calls with KIND WORKLOAD_JSON SETTINGS_JSON."""
    kind, workload, settings = sys.argv[1], Workload(**json.loads(sys.argv[2])), json.loads(sys.argv[3])
    _die_with_parent(settings["parent_pid"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children in order; Ctrl-C reaches it alone
    # Answers get a copy of stdout, and stdout itself becomes stderr: prints of libraries cannot mix with answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        _obey(answers, kind, workload, settings)
    except BaseException as error:
        traceback.print_exc()
        _tell(answers, {"error": f"{type(error).__name__}: {error}"})
        sys.stderr.flush()
        os._exit(1)
    answers.flush()
    os._exit(0)  # interpreter shutdown of a library must not decide whether the measurement counts
