"""Updates alone: all states in memory, the model idle. Of each part, the least of alternating turns is taken, so that other
programs disturb it little; wall-clock figures need an idle machine.

`step` takes the norm of all gradients before the first update, with all of torch's threads. That is measured apart, and taken
off the seconds of the workers.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from rich.table import Table

from infinity.device.compute import gradient_norm
from infinity.entry import initialize

_MOVED_BYTES = 28
"""Per parameter: weight, remainder and two moments are read and written, an fp32 gradient is read."""
_WIDTH = 1024
_SMALL, _LARGE = 32 * 2048, 512 * 2048
"""Elements of a chunk."""
_PAGE_BYTES_PER_ELEMENT = 16
_NORMS, _FUSED = "norms", "torch's fused AdamW"
Turn = Callable[[], tuple[float, float]]
"""Does its work once, and gives the seconds and processor seconds of that."""


class _Layer(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()  # next to nothing to compute


class Engine:
    """An engine whose states are all in memory, and which updates in `step` only."""

    def __init__(self, num_layers: int, chunk_numel: int, workers: int) -> None:
        model = torch.nn.Sequential(*[_Layer(_WIDTH, 4 * _WIDTH, bias=False) for _ in range(num_layers)])
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
        self._engine, *_ = initialize(model=model, config=config)
        self.num_chunks = num_layers * -(-4 * _WIDTH * _WIDTH // self._engine.plan.placement.chunk_numel)
        self._x = torch.ones((), dtype=torch.bfloat16, device="cpu")

    def turn(self) -> tuple[float, float]:
        """Seconds and processor seconds of one step's updates."""
        self._engine.backward(self._engine(self._x))
        return timed(self._engine.step)

    def close(self) -> None:
        """Give the memory back."""
        self._engine.close(restore_weights=False)


def norms(num_layers: int) -> Turn:
    """Of as many gradients, as `step` takes them."""
    gradients = [torch.ones(4 * _WIDTH, _WIDTH, dtype=torch.float32, device="cpu") for _ in range(num_layers)]
    return lambda: timed(lambda: [gradient_norm(gradient) for gradient in gradients])


def fused_adamw(num_layers: int) -> Turn:
    """A step of torch's own, with fp32 main weights and the cast to bf16."""
    numel = 4 * _WIDTH * _WIDTH
    mains = [torch.nn.Parameter(_random(numel)) for _ in range(num_layers)]
    weights = [main.detach().bfloat16() for main in mains]
    for main in mains:
        main.grad = _random(numel)
    optimizer = torch.optim.AdamW(mains, lr=1e-4, fused=True)

    def step() -> None:
        optimizer.step()
        for weight, main in zip(weights, mains, strict=True):
            weight.copy_(main.detach())

    return lambda: timed(step)


def copies(numel: int, num_threads: int) -> Turn:
    """Threads that copy, together, as many bytes as an update of so many parameters moves."""
    num_bytes = numel * _MOVED_BYTES // 2 // num_threads  # each byte is read and written
    pairs = [(np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)) for _ in range(num_threads)]
    pool = ThreadPoolExecutor(num_threads)
    return lambda: timed(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)))


def _random(numel: int) -> torch.Tensor:
    return torch.randn(numel, dtype=torch.float32, device="cpu")


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds of ``work``, those of all threads."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alternate(parts: dict[str, Turn], num_turns: int) -> dict[str, tuple[float, float]]:
    """Least seconds and processor seconds of each, after a turn that does not count."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in parts}
    for number in range(num_turns + 1):
        for name, turn in parts.items():
            taken = turn()
            if number:
                found[name].append(taken)
    return {name: (min(wall for wall, _ in all_), min(cpu for _, cpu in all_)) for name, all_ in found.items()}


@dataclass(frozen=True)
class Row:
    """What one part took."""

    name: str
    seconds: float
    processor_seconds: float
    bytes_per_second: float | None = None
    against_first: float | None = None
    """How much faster than the first number of workers."""
    of_copying: float | None = None
    """Share of the bandwidth of as many threads that copy."""


@dataclass(frozen=True)
class Updates:
    """What updates of so many parameters took."""

    num_parameters: int
    num_turns: int
    chunk_seconds: float
    """Processor time that a chunk costs beside its arithmetic."""
    rows: list[Row]

    def table(self) -> Table:
        """All rows."""
        made = Table(title=f"{self.num_parameters:,} parameters, bf16 with remainders, least of {self.num_turns} turns")
        for head in ("", "seconds", "processor seconds", "GB/s", "against one", "of copying"):
            made.add_column(head, justify="right" if head else "left")
        for row in self.rows:
            made.add_row(
                row.name,
                f"{row.seconds:.4f}",
                f"{row.processor_seconds:.4f}",
                "" if row.bytes_per_second is None else f"{row.bytes_per_second / 1e9:.1f}",
                "" if row.against_first is None else f"{row.against_first:.2f}",
                "" if row.of_copying is None else f"{row.of_copying:.0%}",
            )
        return made


def measure_updates(counts: Sequence[int], num_parameters: float, num_turns: int) -> Updates:
    """Four things, each from alternating turns.

    What a chunk costs beside its arithmetic (processor time with small chunks less that with large ones); how much faster
    several workers are than the first of `counts`; the share of the machine's copy bandwidth (threads, as many as workers, that
    copy as many bytes as an update moves); and the same update by torch's own fused AdamW with all of torch's threads.

    Args:
        counts: numbers of workers.
        num_parameters: about as many are updated, whole layers of 4 Mi.
        num_turns: that count, of each part.
    """
    num_layers = max(round(num_parameters / (4 * _WIDTH * _WIDTH)), 1)
    numel = num_layers * 4 * _WIDTH * _WIDTH
    small, large = Engine(num_layers, _SMALL, 1), Engine(num_layers, _LARGE, 1)
    least = alternate({"small": small.turn, "large": large.turn}, num_turns)
    cost = (least["small"][1] - least["large"][1]) / (small.num_chunks - large.num_chunks)
    small.close()
    large.close()

    engines = {f"{n} workers": Engine(num_layers, _LARGE, n) for n in counts}
    turns = {name: engine.turn for name, engine in engines.items()}
    turns |= {f"copies by {n}": copies(numel, n) for n in counts}
    least = alternate({**turns, _NORMS: norms(num_layers), _FUSED: fused_adamw(num_layers)}, num_turns)
    for engine in engines.values():
        engine.close()
    norm_wall, norm_cpu = least[_NORMS]
    rows = []
    first = least[f"{counts[0]} workers"][0] - norm_wall
    for count in counts:
        wall, cpu = least[f"{count} workers"]
        wall, cpu = wall - norm_wall, cpu - norm_cpu
        speed, share = numel * _MOVED_BYTES / wall, least[f"copies by {count}"][0] / wall
        rows.append(Row(f"{count} workers", wall, cpu, speed, first / wall, share))
    for count in counts:
        wall, cpu = least[f"copies by {count}"]
        rows.append(Row(f"copies by {count}", wall, cpu, numel * _MOVED_BYTES / wall))
    rows += [Row(name, *least[name]) for name in (_NORMS, _FUSED)]
    return Updates(numel, num_turns, cost, rows)
