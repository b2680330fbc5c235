"""What it costs to commit every step: time and bytes of a durable run beside the same training without, in alternating pairs.

Neither keeps anything in memory between steps. With --throttle (root, control groups) the drive is held to so many
MB/s each way. Bytes are those of /proc/self/io. A pair is a number of steps of each, after which all is on the drive.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench.cgroup import throttled
from bench.measured.child import drive_bytes
from torch import nn

import infinity


class Block(nn.Module):
    """Two linear layers, as a transformer's feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.fall(torch.relu(self.rise(x)))
        return result


def make_engine(directory: Path, num_blocks: int, width: int, clipping: float, *, durable: bool) -> Any:
    """Blocks in bf16 with AdamW, everything on the drive."""
    torch.manual_seed(0)
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "infinity": {"host_memory_budget": "600MB", "durable": durable, "keep_in_memory": False},
    }
    return infinity.initialize(model=nn.Sequential(*[Block(width) for _ in range(num_blocks)]), config=config)[0]


def measure(engine: Any, batch: torch.Tensor, num_steps: int) -> tuple[float, int, int]:
    """Seconds, and bytes read and written, of a step."""
    read, written = drive_bytes()
    begin = time.perf_counter()
    for _ in range(num_steps):
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    engine.flush()
    seconds = time.perf_counter() - begin
    after = drive_bytes()
    return seconds / num_steps, (after[0] - read) // num_steps, (after[1] - written) // num_steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="on the drive that is measured")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--clipping", type=float, default=0.0, help="above 0 updates run beside the next forward")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of each half of a pair")
    parser.add_argument("--throttle", type=int, default=0, metavar="MB/s")
    given = parser.parse_args(arguments)
    rows: dict[bool, list[tuple[float, int, int]]] = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.directory)))
        batch = torch.randn(1, given.tokens, given.width).bfloat16()
        engines = {}
        for durable in rows:
            (directory / str(durable)).mkdir()
            engines[durable] = stack.enter_context(
                make_engine(directory / str(durable), given.blocks, given.width, given.clipping, durable=durable)
            )
            measure(engines[durable], batch, 2)
        stack.enter_context(throttled(directory, given.throttle))
        for pair in range(given.pairs):
            for durable in (False, True) if pair % 2 else (True, False):
                rows[durable].append(measure(engines[durable], batch, given.steps))
    medians = {
        durable: [statistics.median(column) for column in zip(*found, strict=True)] for durable, found in rows.items()
    }
    for durable, (seconds, read, written) in medians.items():
        spread = f"{min(row[0] for row in rows[durable]):.3f} to {max(row[0] for row in rows[durable]):.3f}"
        what = "durable" if durable else "without"
        print(f"{what}: {seconds:.3f} s ({spread}), {read / 1e6:.2f} MB read, {written / 1e6:.2f} MB written per step")
    ratios = sorted(after[0] / before[0] for before, after in zip(rows[False], rows[True], strict=True))
    print(f"time {statistics.median(ratios) - 1:+.1%} (pairs: {ratios[0] - 1:+.1%} to {ratios[-1] - 1:+.1%})")
    for word, index in (("read", 1), ("written", 2)):
        print(f"bytes {word} {medians[True][index] / max(medians[False][index], 1) - 1:+.2%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
