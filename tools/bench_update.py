#!/usr/bin/env python3
"""Measures updates alone: all states in memory, the model idle. Prints four things, each from alternating turns:

    python tools/bench_update.py
    python tools/bench_update.py --workers 1,2,4 --parameters 200e6 --turns 9

  * what a chunk costs beside its arithmetic: processor time with small chunks less that with large ones, per chunk;
  * how much faster several workers are than one;
  * the share of the machine's copy bandwidth: threads, as many as workers, that copy as many bytes as an update moves;
  * the same update by torch's own fused AdamW, with fp32 main weights and all of torch's threads.

`step` takes the norm of all gradients before the first update, with all of torch's threads. That is measured apart, and taken
off the seconds of the workers. Of each part it takes the least of all turns, so that other programs disturb it little;
wall-clock figures need an idle machine.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import infinity
from infinity.device.compute import gradient_norm

_MOVED_BYTES = 28
"""Per parameter: weight, remainder and two moments are read and written, an fp32 gradient is read."""
_WIDTH = 1024
_SMALL, _LARGE = 32 * 2048, 512 * 2048
"""Elements of a chunk."""
_PAGE_BYTES_PER_ELEMENT = 16
_NORMS = "norms"


class Engine:
    """An engine whose states are all in memory, and which updates in `step` only."""

    def __init__(self, num_layers: int, chunk_numel: int, workers: int) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, 4 * _WIDTH, bias=False) for _ in range(num_layers)])
        for layer in model:
            layer.forward = lambda x, layer=layer: x + layer.weight.mean()  # next to nothing to compute
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
            "infinity": {
                "host_memory_budget": "16GB",
                "page_bytes": chunk_numel * _PAGE_BYTES_PER_ELEMENT,
                "update": "step",
                "update_workers": workers,
            },
        }
        self._engine, *_ = infinity.initialize(model=model, config=config)
        self.num_chunks = num_layers * -(-4 * _WIDTH * _WIDTH // self._engine.plan.placement.chunk_numel)
        self._x = torch.ones((), dtype=torch.bfloat16)

    def turn(self) -> tuple[float, float]:
        """Seconds and processor seconds of one step's updates."""
        self._engine.backward(self._engine(self._x))
        return timed(self._engine.step)

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close(restore_weights=False)


class Norms:
    """Of as many gradients, as `step` takes them."""

    def __init__(self, num_layers: int) -> None:
        self._gradients = [torch.ones(4 * _WIDTH, _WIDTH) for _ in range(num_layers)]

    def turn(self) -> tuple[float, float]:
        """Seconds and processor seconds of all of them."""
        return timed(lambda: [gradient_norm(gradient) for gradient in self._gradients])


class FusedAdamW:
    """torch's own, with fp32 main weights and the cast to bf16."""

    def __init__(self, num_layers: int) -> None:
        numel = 4 * _WIDTH * _WIDTH
        self._mains = [torch.nn.Parameter(torch.randn(numel)) for _ in range(num_layers)]
        self._weights = [main.detach().bfloat16() for main in self._mains]
        for main in self._mains:
            main.grad = torch.randn(numel)
        self._optimizer = torch.optim.AdamW(self._mains, lr=1e-4, fused=True)

    def turn(self) -> tuple[float, float]:
        """Seconds and processor seconds of one step."""
        return timed(self._step)

    def _step(self) -> None:
        self._optimizer.step()
        for weight, main in zip(self._weights, self._mains, strict=True):
            weight.copy_(main.detach())


class Copies:
    """Threads that copy, together, as many bytes as an update of so many parameters moves."""

    def __init__(self, numel: int, num_threads: int) -> None:
        num_bytes = numel * _MOVED_BYTES // 2 // num_threads  # each byte is read and written
        self._pairs = [
            (np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)) for _ in range(num_threads)
        ]
        self._pool = ThreadPoolExecutor(num_threads)

    def turn(self) -> tuple[float, float]:
        """Seconds and processor seconds of one round."""
        return timed(lambda: list(self._pool.map(lambda pair: np.copyto(*pair), self._pairs)))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds of ``work``, those of all threads."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alternate(parts: dict[str, Engine | Norms | FusedAdamW | Copies], num_turns: int) -> dict[str, tuple[float, float]]:
    """Least seconds and processor seconds of each, after a turn that does not count."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for number in range(num_turns + 1):
        for name, part in parts.items():
            taken = part.turn()
            if number:
                found[name].append(taken)
    return {name: (min(wall for wall, _ in all_), min(cpu for _, cpu in all_)) for name, all_ in found.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2", help="numbers of workers, e.g. 1,2,4 (default 1,2)")
    parser.add_argument("--parameters", type=float, default=67e6, help="(default 67e6)")
    parser.add_argument("--turns", type=int, default=7, help="(default 7)")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.workers.split(",")]
    num_layers = max(round(arguments.parameters / (4 * _WIDTH * _WIDTH)), 1)
    numel = num_layers * 4 * _WIDTH * _WIDTH

    small, large = Engine(num_layers, _SMALL, 1), Engine(num_layers, _LARGE, 1)
    least = alternate({"small": small, "large": large}, arguments.turns)
    cost = (least["small"][1] - least["large"][1]) / (small.num_chunks - large.num_chunks)
    small.close()
    large.close()

    parts: dict[str, Engine | Norms | FusedAdamW | Copies]
    parts = {f"{n} workers": Engine(num_layers, _LARGE, n) for n in counts}
    parts |= {f"copies by {n}": Copies(numel, n) for n in counts}
    parts[_NORMS] = Norms(num_layers)
    parts["torch's fused AdamW"] = FusedAdamW(num_layers)
    least = alternate(parts, arguments.turns)
    for count in counts:
        (wall, cpu), (norm_wall, norm_cpu) = least[f"{count} workers"], least[_NORMS]
        least[f"{count} workers"] = wall - norm_wall, cpu - norm_cpu
    table = Table(title=f"{numel:,} parameters, bf16 with remainders, least of {arguments.turns} turns")
    for head in ("", "seconds", "processor seconds", "GB/s", "against one", "of copying"):
        table.add_column(head, justify="right" if head else "left")
    first = least[f"{counts[0]} workers"][0]
    for name, (seconds, busy) in least.items():
        row = [name, f"{seconds:.4f}", f"{busy:.4f}"]
        if name.endswith("workers"):
            count = name.removesuffix(" workers")
            row += [f"{numel * _MOVED_BYTES / seconds / 1e9:.1f}", f"{first / seconds:.2f}"]
            row.append(f"{least[f'copies by {count}'][0] / seconds:.0%}")
        elif name.startswith("copies"):
            row.append(f"{numel * _MOVED_BYTES / seconds / 1e9:.1f}")
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"a chunk costs {cost * 1e3:.3f} ms of processor time beside its arithmetic")
    return 0


if __name__ == "__main__":
    sys.exit(main())
