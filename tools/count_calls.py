"""Counts what one training step costs in Python: calls of the packages by thread, and lock acquisitions. Uses no clock.

    python tools/count_calls.py                  # 8 blocks, 90 parameters, everything on the drive
    python tools/count_calls.py --blocks 1000 --width 8 --json

Three runs of one commit: calls of the main thread within 0.2 per cent of each other, locks within 3, for waits look up now
and then. The states are on the drive; 16 MB have room for the weights once they are read. A step is counted from its forward
until everything that it wrote is stored.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (f"{ROOT / 'infinity'}/", f"{ROOT / 'swapper'}/")
NUM_STEPS = 4
"""The last one is counted: the first ones record the order of the layers and compile kernels."""


class Counts:
    """Calls by kind of thread, and lock acquisitions in all threads, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[str] = Counter()
        self.by_function: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.locks = 0

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """For `sys.setprofile`."""
        code = frame.f_code
        if event == "call" and self.is_on and code.co_filename.startswith(PACKAGES):
            thread = threading.current_thread()
            # "swapper-worker-3" and "swapper-worker-4" are one kind.
            kind = "main thread" if thread is threading.main_thread() else thread.name.rstrip("0123456789-_ ")
            self.calls[kind] += 1
            self.by_function[kind][f"{code.co_filename.removeprefix(str(ROOT) + '/')}:{code.co_qualname}"] += 1


def count_locks(counts: Counts) -> None:
    """Replaces the lock types of `threading` by ones that count. Call it before the packages are imported."""

    def counting(make: Any) -> Any:
        class Counting:
            def __init__(self) -> None:
                self._lock = make()

            def acquire(self, *arguments: Any, **options: Any) -> bool:
                # Not exact: two threads may add at the same time, and one is lost. Three runs agree within 3 %, see
                # above.
                counts.locks += counts.is_on
                return bool(self._lock.acquire(*arguments, **options))

            def __enter__(self) -> bool:
                return self.acquire()

            def __exit__(self, *error: object) -> None:
                self._lock.release()

            def __getattr__(self, name: str) -> Any:  # release, locked, and what a Condition asks an RLock for
                return getattr(self._lock, name)

        return Counting

    # Modules that were imported before keep the real types, and so do C extensions.
    threading.Lock, threading.RLock = counting(threading.Lock), counting(threading.RLock)  # type: ignore[misc]


def make_model(num_blocks: int, width: int) -> Any:
    """A decoder without attention's arithmetic: a block has 10 modules and 11 parameters, as a Llama's with two biases."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.o = nn.Linear(width, width)
            self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
            self.down = nn.Linear(2 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            x = x + self.o(torch.tanh(self.q(y)) * self.k(y) + self.v(y))
            y = self.norm2(x)
            return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, width)
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
            self.norm = nn.RMSNorm(width)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy((self.norm(x) @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())

    torch.manual_seed(0)
    return Model()


def count(
    num_blocks: int, width: int, directory: Path, num_functions: int = 25, budget: str = "16MB"
) -> dict[str, Any]:
    """Count one step with everything on the drive; ``num_functions`` of each kind of thread are named."""
    counts = Counts()
    count_locks(counts)
    # For threads that start from now on; `sys.setprofile` below is for this one.
    threading.setprofile(counts.profile)
    import torch

    import infinity
    from swapper import Swapper

    # Threads of OpenMP run no Python; one is enough.
    torch.set_num_threads(1)
    place = {"device": "nvme", "nvme_path": str(directory)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        # Everything has to be read and written, or there would be few calls to count.
        "infinity": {"host_memory_budget": budget, "keep_in_memory": False},
    }

    def num_transfers() -> int:
        """Return the reads and writes of all swappers of this process."""
        # Swappers are private parts of the engine. The garbage collector knows them.
        statistics = [swapper.statistics() for swapper in gc.get_objects() if type(swapper) is Swapper]
        return sum(each.num_reads + each.num_writes for each in statistics)

    engine, *_ = infinity.initialize(model=make_model(num_blocks, width), config=config)
    tokens = torch.randint(0, 64, (1, 8))
    with engine:
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                # No work of the steps before is left.
                engine.flush()
                before = num_transfers()
                counts.is_on = True
                sys.setprofile(counts.profile)
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
        engine.flush()
        counts.is_on = False
        sys.setprofile(None)
        plan, transfers = engine.plan, num_transfers() - before
    calls = dict(counts.calls.most_common())
    # Bytes of a unit / 4 are its elements; the division is rounded up.
    num_chunks = sum(
        -(-num_bytes // 4 // plan.placement.chunk_numel) for _, num_bytes in plan.units
    )  # all of it is fp32
    in_all = sum(calls.values())
    return {
        "units": len(plan.units),
        "chunks": num_chunks,
        "transfers": transfers,
        "calls": calls,
        "calls of all threads": in_all,
        "lock acquisitions": counts.locks,
        "calls of the main thread per unit": round(calls["main thread"] / len(plan.units)),
        "calls of the other threads per chunk": round((in_all - calls["main thread"]) / num_chunks),
        "calls of all threads per transfer": round(in_all / transfers),
        **{f"most called: {kind}": dict(counts.by_function[kind].most_common(num_functions)) for kind in calls},
    }


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--budget", default="16MB", help="of host memory")
    parser.add_argument("--functions", type=int, default=25, help="so many are named of each kind of thread")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        counted = count(arguments.blocks, arguments.width, Path(directory), arguments.functions, arguments.budget)
    if arguments.json:
        print(json.dumps(counted, indent=1))
        return
    for name, value in counted.items():
        for each, number in value.items() if isinstance(value, dict) else ((name, value),):
            print(f"{number!s:>9}  {each}")


if __name__ == "__main__":
    main()
