"""How fast a checkpoint is saved and loaded, beside fio on the same drive.

States that rest on that drive are read from it while the checkpoint is written, and written to it while one is loaded: the
figure beside both is that of fio reading one file and writing another at the same time, "both". With --throttle (root, control
groups) the drive is held to so many MB/s each way.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench.cgroup import throttled
from fio import same_moment
from torch import nn

import infinity
from infinity.checkpoint.saved import Checkpoint


def make_engine(directory: Path, num_layers: int, width: int, budget: str) -> Any:
    """A stack of linear layers in bf16 with AdamW, on the drive as far as the budget does not hold it."""
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(directory)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(directory)},
        },
        "infinity": {"host_memory_budget": budget},
    }
    return infinity.initialize(model=model, config=config)[0]


def main() -> None:
    """Print the figures."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("directory", type=Path, help="on the drive that is measured")
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument(
        "--budget", default="192MiB", help="of host memory; what it holds is not read from the drive"
    )
    arguments.add_argument("--throttle", type=int, default=0, metavar="MB/s")
    given = arguments.parse_args()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.directory)))
        stack.enter_context(throttled(directory, given.throttle))
        engine = make_engine(directory, given.layers, given.width, given.budget)
        with engine:
            engine.backward(engine(torch.randn(1, given.width).bfloat16()).float().square().mean())
            engine.step()
            engine.flush()
            rows: dict[str, list[float]] = {"write": [], "both": [], "save": [], "read": [], "load": []}
            for turn in range(3):
                print("measuring ...", flush=True)
                rows["write"].append(same_moment(directory, 1 << 30, "write"))
                shutil.rmtree(directory / "saved", ignore_errors=True)  # giving space back takes time of its own
                start = time.perf_counter()
                engine.save_checkpoint(directory / "saved", tag=str(turn))
                seconds = time.perf_counter() - start
                num_bytes = sum(tensor.num_bytes for tensor in Checkpoint.open(directory / "saved").tensors)
                rows["save"].append(num_bytes / seconds)
                rows["read"].append(same_moment(directory, 1 << 30, "read"))
                rows["both"].append(same_moment(directory, 1 << 30, "read", "write"))
                start = time.perf_counter()
                engine.load_checkpoint(directory / "saved")
                engine.flush()
                rows["load"].append(num_bytes / (time.perf_counter() - start))
    medians = {what: sorted(found)[1] for what, found in rows.items()}
    print(f"checkpoint of {num_bytes / 1e9:.2f} GB; medians of three, MB/s")
    for ours, peer in (("save", "write"), ("save", "both"), ("load", "read"), ("load", "both")):
        share = medians[ours] / medians[peer]
        spread = f"{min(rows[ours]) / 1e6:.0f} to {max(rows[ours]) / 1e6:.0f}"
        print(f"{ours}: {medians[ours] / 1e6:.0f} ({spread}), fio {peer}: {medians[peer] / 1e6:.0f}: {share:.0%}")
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
