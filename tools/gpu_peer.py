#!/usr/bin/env python3
"""The same model on the same tokens with one GPU: plain torch in memory, Infinity, and DeepSpeed at its best.

    python tools/gpu_peer.py --drives /mnt/t0 /mnt/t1 /mnt/t2 /mnt/t3 --out answers.jsonl
    python tools/gpu_peer.py --drives DIR --out answers.jsonl --set more
    python tools/gpu_peer.py --drives DIR --out answers.jsonl --set tiny       # tries the command itself, on a CPU too

Each runs alone, in a process of its own, and gets a limit of its own; six of them end within 480 s. DeepSpeed is taken from
``--peer-python`` (an environment that has it), or from the folder ``--peer-packages``: wheels, and ``ds_site.zip`` with its
operators made beforehand, for machines without a compiler or without a network. What is not there is said, and the others run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench.measured.models import Workload
from bench.options import revision
from bench.participant import OURS, Participant, ParticipantFailed, ParticipantSpec

# For all runs of a set together. A run that would begin too late is reported, and not started.
_SLOT_SECONDS = 480
_NEEDS = ("deepspeed", "hjson", "pydantic", "msgpack", "einops", "cpuinfo")
"""What DeepSpeed imports."""
# Name -> class of DeepSpeed's op_builder. Both are C++ extensions: compiled on the spot, or brought along.
_OPERATORS = {"async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder"}
# Runs in the other interpreter. Libraries print as well, so the answer has a mark in front.
_ASK = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1].split(",") if importlib.util.find_spec(name) is None]
if not missing:
    from deepspeed.ops import op_builder
    for name, builder in json.loads(sys.argv[2]).items():
        try:
            getattr(op_builder, builder)().load(verbose=False)
        except Exception as error:
            missing.append(f"its operator {name} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
print("MISSING " + json.dumps(missing))
"""


@dataclass(frozen=True)
class Run:
    """A participant with its model and its limit in seconds; ``num_drives`` of those given."""

    name: str
    kind: str
    workload: Workload
    limit: int
    settings: dict[str, Any] = field(default_factory=dict)
    num_drives: int = 1
    warm: int = 2
    steps: int = 3


_1B = Workload(model="1b", batch_size=4, seq_len=512, clip=1.0, checkpointing="non-reentrant", learning_rate=1e-5)
_3B = Workload(model="3b", batch_size=4, seq_len=1024, clip=1.0, checkpointing="non-reentrant", learning_rate=1e-5)
_FREE = Workload(model="1b", batch_size=4, seq_len=512, clip=0.0, checkpointing="non-reentrant", learning_rate=1e-5)
_TINY = Workload(model="tiny", seq_len=32, clip=1.0, checkpointing="non-reentrant")


# In elements. DeepSpeed's own default for a sub-group is 1e9.
def _deepspeed(states: str = "nvme", sub_group: float = 1e8, *, fp32_gradients: bool = False) -> dict[str, Any]:
    return {"variant": "gpu", "states": states, "sub_group": sub_group, "fp32_gradients": fp32_gradients}


SETS = {
    "first": [
        Run("plain 1B", "in_memory", _1B, 40, steps=5),
        Run("ours 1B, 2 GB", "ours", _1B, 60, {"budget": "2GB"}),
        Run("ours 1B, 2 GB, 4 drives", "ours", _1B, 60, {"budget": "2GB"}, num_drives=4),
        Run("DeepSpeed 1B", "deepspeed", _1B, 90, _deepspeed()),
        Run("ours 3B, 8 GB", "ours", _3B, 80, {"budget": "8GB"}),
        Run("DeepSpeed 3B", "deepspeed", _3B, 150, _deepspeed(), warm=1, steps=2),
    ],
    "more": [
        Run("DeepSpeed 1B, sub-groups of 3e8", "deepspeed", _1B, 80, _deepspeed(sub_group=3e8)),
        Run("DeepSpeed 1B, fp32 gradients", "deepspeed", _1B, 80, _deepspeed(fp32_gradients=True)),
        Run("ours 1B, 2 GB, unclipped", "ours", _FREE, 60, {"budget": "2GB"}),
        Run("DeepSpeed 1B, states in RAM", "deepspeed", _1B, 60, _deepspeed("cpu")),
        Run("DeepSpeed 1B, super_offload", "deepspeed", _1B, 60, _deepspeed("super")),
        Run("DeepSpeed 1B, super_offload, unclipped", "deepspeed", _FREE, 60, _deepspeed("super")),
        Run("ours 1B, 24 GB", "ours", _1B, 60, {"budget": "24GB"}),
    ],
    "tiny": [
        Run("plain", "in_memory", _TINY, 160),
        Run("ours, 16 MB", "ours", _TINY, 160, {"budget": "16MB"}),
        Run("DeepSpeed", "deepspeed", _TINY, 160, _deepspeed()),
    ],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a set, and write a JSON line for each participant. Returns 1 where one failed or could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drives", nargs="+", type=Path, required=True, metavar="DIR", help="one directory per drive")
    parser.add_argument("--out", type=Path, required=True, help="file for the answers, a JSON line each")
    parser.add_argument("--set", choices=SETS, default="first", help="which runs (default: first)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these, those whose name begins so")
    parser.add_argument("--peer-packages", type=Path, default=Path(".peer"), help="folder of wheels and ds_site.zip")
    parser.add_argument("--peer-python", help="Python of an environment that has DeepSpeed, in place of the folder")
    asked = parser.parse_args(arguments)
    if asked.set != "tiny" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --set tiny tries the command without one")
    runs = [run for run in SETS[asked.set] if not asked.only or run.name.startswith(tuple(asked.only))]
    lines = []
    with _deepspeed_place(asked) as (spec, missing):
        began = time.monotonic()  # not before: where its operators are compiled, it takes minutes, once
        for run in runs:
            # With less than 20 seconds left, no run would get to its first step.
            left = _SLOT_SECONDS - (time.monotonic() - began)
            print(f"== {run.name} (at most {min(run.limit, left):.0f} s)", flush=True)
            problem = missing if run.kind == "deepspeed" else ""
            problem = problem or ("" if left > 20 else "the time of this slot is used up")
            answer = {"error": problem} if problem else _measured(run, asked.drives, spec, min(run.limit, left))
            lines.append({"name": run.name, **_circumstances(), **answer})
            print(_told(answer), flush=True)
            # After each run: a slot that is cut off keeps what was measured.
            asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} answers in {asked.out}, {time.monotonic() - began:.0f} s")
    return int(any("error" in line for line in lines))


@contextlib.contextmanager
def _deepspeed_place(asked: argparse.Namespace) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where DeepSpeed runs (arguments of a ParticipantSpec), and what is missing for it ("": nothing)."""
    with tempfile.TemporaryDirectory() as site:
        if asked.peer_python:
            spec, problem = {"python": asked.peer_python}, ""
            cure = f"install it there: {asked.peer_python} -m pip install deepspeed"
        else:
            # The unpacked packages come before our own folder.
            spec, problem = {"path": f"{site}:{OURS}"}, _unpacked(asked.peer_packages, Path(site))
            cure = f"put its wheels, and ds_site.zip with its operators, into {asked.peer_packages}, or name a "
            cure += "--peer-python that has it"
        problem = problem or _missing(spec)
        yield spec, f"DeepSpeed: {problem}; {cure}" if problem else ""


def _unpacked(folder: Path, site: Path) -> str:
    """Unpack the wheels of a folder as pip does; return what is wrong with them."""
    # A wheel is a zip file of packages. The operators come last: they belong into the package.
    archives = [*sorted(folder.glob("*.whl")), *folder.glob("ds_site.zip")]
    try:
        for archive in archives:
            shutil.unpack_archive(archive, site, "zip")
            # A wheel may keep its packages in NAME-VERSION.data/purelib or platlib, next to scripts and headers.
            for packages in (*site.glob("*.data/purelib"), *site.glob("*.data/platlib")):
                shutil.copytree(packages, site, dirs_exist_ok=True)
                shutil.rmtree(packages)
    except (shutil.ReadError, zipfile.BadZipFile) as error:
        return str(error)
    return "" if archives else f"no wheels and no ds_site.zip in {folder}"


def _extensions() -> str:
    """Return the folder in which DeepSpeed keeps the operators that it compiles."""
    return os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache/torch_extensions"))


def _missing(spec: dict[str, Any]) -> str:
    """Return what DeepSpeed lacks there, in words."""
    python = spec.get("python", sys.executable)
    environment = {
        "PYTHONPATH": spec.get("path", ""),
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu",
        "TORCH_EXTENSIONS_DIR": _extensions(),
    }
    child = [python, "-c", _ASK, ",".join(_NEEDS), json.dumps(_OPERATORS)]
    asked = subprocess.run(child, capture_output=True, text=True, check=False, env=os.environ | environment)
    told = [line for line in asked.stdout.splitlines() if line.startswith("MISSING ")]
    if not told:
        reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"missing a DeepSpeed that can be imported ({reason})"
    missing = json.loads(told[-1].removeprefix("MISSING "))
    return f"missing {', '.join(missing)}" if missing else ""


def _measured(run: Run, drives: Sequence[Path], place: dict[str, Any], limit: float) -> dict[str, Any]:
    """Run one participant; return seconds of each step, bytes, peaks and losses, or an error."""
    build_on = "cuda" if torch.cuda.is_available() else "cpu"
    settings = run.settings | {"build_on": build_on, "counts_bytes": True, "extensions_directory": _extensions()}
    # One folder on each drive, removed at the end whatever happens.
    own = [Path(tempfile.mkdtemp(prefix="peer_", dir=drive)) for drive in drives[: run.num_drives]]
    if run.kind == "ours" and len(own) > 1:
        settings["drives"] = [str(drive) for drive in own]
    spec = ParticipantSpec(run.name, run.kind, settings, **(place if run.kind == "deepspeed" else {}))
    began = time.monotonic()
    try:
        if len(own) < run.num_drives:
            return {"error": f"it wants {run.num_drives} drives: name them by --drives"}
        with Participant(spec, run.workload, own[0], controllers=(), limit_seconds=limit) as participant:
            participant.run_turn(run.warm, counts=False)
            turn = participant.run_turn(run.steps, counts=True)
            ready = participant.ready["ready_seconds"]
    except ParticipantFailed as error:
        # `Participant` kills a run at its limit, which looks like any other death.
        late = time.monotonic() - began > limit
        return {"error": f"not at its end after {limit:.0f} s" if late else str(error)}
    finally:
        for drive in own:
            shutil.rmtree(drive, ignore_errors=True)
    keys = ("seconds", "total_seconds", "losses", "high_water_bytes", "device_peak_bytes")
    per_step = {f"{way}_bytes_per_step": turn[f"{way}_bytes"] / run.steps for way in ("read", "write")}
    return {"ready_seconds": ready, "num_parameters": turn["description"]["num_parameters"], **per_step} | {
        key: turn[key] for key in keys
    }


def _told(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"   FAILED: {answer['error']}"
    mean = answer["total_seconds"] / len(answer["seconds"])
    peak = answer["device_peak_bytes"]
    return (
        f"   {mean:.3f} s a step ({', '.join(f'{second:.3f}' for second in answer['seconds'])}), "
        f"{answer['read_bytes_per_step'] / 1e9:.2f} GB read, {answer['write_bytes_per_step'] / 1e9:.2f} written, "
        f"host {answer['high_water_bytes'] / 1e9:.1f} GB, GPU {'-' if peak is None else f'{peak / 1e9:.1f} GB'}, "
        f"loss {answer['losses'][-1]:.4f}"
    )


def _circumstances() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "machine": gpu,
        "torch": torch.__version__,
        "commit": revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    sys.exit(main())
