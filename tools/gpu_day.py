#!/usr/bin/env python3
"""The parts of gpu_day.sh that measure: training within budgets, its bits, and what waits for the GPU.

python tools/gpu_day.py train --size 3b --host-budget 8GB --device-budget 6GB --nvme-path /mnt/nvme
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import statistics
import sys
import warnings
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from train import SIZES, RandomWindows, Size, build_model, read_text, reset_high_water, resident_bytes

import infinity

# The shape of Llama 3 8B: 8 key-value heads and a vocabulary of 128256.
_SIZES = SIZES | {"8b": Size(4096, 32, 14336, 32, 8, vocabulary=128256, seq_len=1024, batch_size=1, learning_rate=6e-5)}
_SIMULATED_SIZE = dataclasses.replace(SIZES["tiny"], batch_size=2)
_WARM = 3
"""Steps until what is read and updated when repeats itself."""
_BYTES_SHARE = 0.01
"""How far bytes may be off the plan's, beside those of one unit: an update that still runs when a step ends counts later."""
_BESIDE_BYTES = 3 << 30
"""What CUDA's libraries and the data may take of host memory beside the engine: 0.9 GB beyond a budget of 1 GB
on an H200 with torch 2.11."""


def _device(simulated: bool) -> tuple[str, Any]:
    """The device to build on, and the simulated GPU (None: a real one)."""
    if not simulated:
        return "cuda", None
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.simulated_gpu import backend
    from tests.simulated_gpu.device import SimulatedGpu

    backend.register()
    gpu = SimulatedGpu()
    # The function of the same name hides the module in the package's namespace.
    importlib.import_module("infinity.entry").device_for = lambda torch_device: gpu  # type: ignore[attr-defined]
    return backend.NAME, gpu


def _engine(
    arguments: argparse.Namespace, size: Size, device: str, num_steps: int, *, in_memory: bool = False
) -> tuple[Any, Any]:
    """An engine, and the batches of the micro-batches in their order. ``in_memory``: it pages nothing."""
    drives = arguments.nvme_path
    nvme: dict[str, Any] = {"device": "nvme", "nvme_path": drives if len(drives) > 1 else drives[0]}
    own = {"host_memory_budget": arguments.host_budget, "device_memory_budget": arguments.device_budget}
    own |= {"update_workers": arguments.update_workers} if arguments.update_workers else {}
    own |= {"schedule": arguments.schedule} if arguments.schedule else {}
    # The reference: nothing is paged, and one worker updates the chunks in order.
    if in_memory:
        nvme, own = {"device": "cpu"}, {"update_workers": 1}
    config = {
        "train_micro_batch_size_per_gpu": size.batch_size,
        "gradient_accumulation_steps": arguments.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": size.learning_rate / 10}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": nvme,
            "offload_optimizer": {"device": "none"} if arguments.updates_on_device else nvme,
        },
        "infinity": own | ({"timeline": str(arguments.timeline)} if arguments.timeline else {}),
    }
    torch.manual_seed(0)
    with torch.device(device):  # where random numbers are made faster
        model = build_model(size, size.seq_len, torch.bfloat16, "non-reentrant")
    samples = num_steps * arguments.micro_batches * size.batch_size
    windows = RandomWindows(read_text(None), size.seq_len, samples, seed=0)
    loader = torch.utils.data.DataLoader(windows, batch_size=size.batch_size)
    batches = ({name: value.to(device) for name, value in batch.items()} for batch in loader)
    engine, *_ = infinity.initialize(model=model, config=config)
    return engine, batches


def train(arguments: argparse.Namespace) -> int:
    """Trains, and compares losses, peaks and bytes with what was promised. Returns 1 where one is broken."""
    device, simulated = _device(arguments.simulated)
    size = _SIZES[arguments.size]
    if simulated is not None:
        size, arguments.host_budget, arguments.device_budget = _SIMULATED_SIZE, "4MB", "auto"
    before = resident_bytes("VmRSS")
    engine, batches = _engine(arguments, size, device, arguments.steps + arguments.warm)
    # So that the peak is that of training.
    reset_high_water()  # what building the model took
    reports = []
    with engine:
        print(engine.plan)
        for _ in range(arguments.steps + arguments.warm):
            engine.train_batch(batches)
            reports.append(engine.report)
        if simulated is None:
            torch.cuda.synchronize()
    # Figures of the first steps do not repeat, see `_WARM`.
    timed = reports[arguments.warm :]
    losses = [report.loss for report in reports]
    print(f"losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"step {statistics.median(report.seconds for report in timed):.3f} s, schedule {timed[-1].schedule}")
    broken = []
    # Written this way round, a NaN is broken as well.
    if not losses[-1] < losses[0]:
        broken.append("the loss does not fall")
    for name in ("read", "write"):
        moved = sum(getattr(report, f"{name}_bytes") for report in timed)
        predicted = sum(getattr(report, f"predicted_{name}_bytes") for report in timed)
        print(f"{name} {moved / len(timed) / 1e9:.4f} GB a step, predicted {predicted / len(timed) / 1e9:.4f}")
        # Of a model with five small units, one update more or less is much.
        if simulated is None and abs(moved - predicted) > predicted * (
            _BYTES_SHARE + 1 / (len(engine.plan.units) * len(timed))
        ):
            broken.append(f"bytes {name} are off the prediction")
    if simulated is None:  # whose memory is host memory
        budget, taken = engine.plan.host_budget_bytes, resident_bytes("VmHWM") - before
        print(f"host memory {taken / 1e9:.3f} GB more than before the model, budget {budget / 1e9:.3f}")
        if taken > budget + _BESIDE_BYTES:
            broken.append("host memory is above its budget")
    on_device = [report.device_peak_bytes for report in reports if report.device_peak_bytes is not None]
    if on_device:
        print(f"device memory at most {max(on_device) / 1e9:.3f} GB, activations included")
    for each in broken:
        print(f"BROKEN: {each}")
    return 1 if broken else 0


def same_bits(arguments: argparse.Namespace) -> int:
    """Trains in memory with one update worker, then through the drive with many. Returns 1 where bits differ."""
    device, simulated = _device(arguments.simulated)
    size = _SIZES[arguments.size]
    arguments.update_workers = 8
    if simulated is not None:
        size, arguments.host_budget, arguments.update_workers = _SIMULATED_SIZE, "4MB", 3
    # Kernels with atomic additions would differ from run to run in plain torch, too.
    torch.use_deterministic_algorithms(True)
    found: list[dict[str, Any]] = []
    for in_memory in (True, False):
        engine, batches = _engine(arguments, size, device, arguments.steps, in_memory=in_memory)
        values: dict[str, Any] = {}
        with engine:
            for step in range(arguments.steps):
                engine.train_batch(batches)
                values[f"loss of step {step}"] = engine.report.loss
                values[f"norm of step {step}"] = engine.report.grad_norm
            for name, value in engine.module.state_dict().items():
                # Bytes and not values: NaN is not equal to itself, and -0 is equal to 0.
                values[name] = zlib.crc32(value.cpu().contiguous().view(torch.uint8).numpy())
            moved = engine.report.read_bytes + engine.report.write_bytes
        found.append(values)
        print(f"{'in memory' if in_memory else 'paged'}: {moved / 1e6:.1f} MB in the last step")
        print("losses " + " ".join(f"{values[f'loss of step {step}']:.7f}" for step in range(arguments.steps)))
    different = [name for name, value in found[0].items() if found[1].get(name) != value]
    for name in different[:10]:
        print(f"BROKEN: {name} differs: {found[0][name]} in memory, {found[1].get(name)} paged")
    print(f"{len(different)} of {len(found[0])} losses, norms and weights differ")
    return 1 if different else 0


def synchronisations(arguments: argparse.Namespace) -> int:
    """Lists what makes the host wait in one step of a small model, with how often."""
    device, simulated = _device(arguments.simulated)
    size = _SIMULATED_SIZE if simulated is not None else dataclasses.replace(SIZES["demo"], batch_size=2)
    arguments.host_budget, arguments.device_budget = "4MB" if simulated else "64MB", "auto"
    engine, batches = _engine(arguments, size, device, _WARM + 1)
    found: Counter[str] = Counter()
    with engine:
        for _ in range(_WARM):
            engine.train_batch(batches)
        if simulated is not None:
            before = len(simulated.synchronisations)
            engine.train_batch(batches)
            found.update(simulated.synchronisations[before:])
        else:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                # torch then warns at each call that waits for the GPU.
                torch.cuda.set_sync_debug_mode("warn")
                engine.train_batch(batches)
                torch.cuda.set_sync_debug_mode("default")
            waits = [warning for warning in told if "synchron" in str(warning.message)]
            found.update(f"{warning.filename}:{warning.lineno}" for warning in waits)
    for where, times in found.most_common():
        print(f"{times:5d}  {where}")
    print(f"{found.total()} in one step")
    return 0


PARTS = {"train": train, "same-bits": same_bits, "synchronisations": synchronisations}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--simulated", action="store_true", help="on the simulated GPU of the tests, with a small model")
    add("--nvme-path", required=True, action="append", help="directory for the states; one for each drive")
    add("--size", choices=_SIZES, default="1b")
    add("--host-budget", default="8GB")
    add("--device-budget", default="auto")
    add("--micro-batches", type=int, default=1)
    add("--steps", type=int, default=5, help="that are measured")
    add("--warm", type=int, default=_WARM, help=f"train: steps before those (default: {_WARM})")
    add("--schedule", choices=["vertical", "ordinary"], help="order of micro-batches, else as planned")
    add("--timeline", type=Path)
    add("--update-workers", type=int, help="threads that run updates, else as the plan says")
    add("--updates-on-device", action="store_true", help="the optimizer and its states are there")
    arguments = parser.parse_args()
    return PARTS[arguments.part](arguments)


if __name__ == "__main__":
    sys.exit(main())
