"""How much is measured, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from swapper.config import BackendName

MIB = 1 << 20
GIB = 1 << 30
BACKENDS: tuple[BackendName, ...] = ("threads", "uring", "aiofiles")
"""Swept unless `--backends` says otherwise."""
LEAST_PAIRS = 7
"""Fewer give an interval below 95 %."""


@dataclass(frozen=True)
class Effort:
    """Lengths in seconds, sizes in bytes.

    Attributes:
        file_bytes: size of the test file in each directory.
        sample_seconds: length of one measurement of the sweep.
        pair_seconds: length of each half of a pair of the final comparison.
        num_repetitions: rounds of the sweep.
        num_pairs: pairs of the final comparison.
        num_engine_trials: how often each engine of fio is tried before the best one goes on.
        rechecks_engines: whether the engines are tried once more at fio's best setting.
        request_sizes: bytes of one request.
        depths: requests in flight.
        longest_fill_seconds: the test files are cut short where writing them takes longer.
        limit_seconds: rounds of the sweep are left out where all would take longer than this; None for no limit.
    """

    file_bytes: int = GIB
    sample_seconds: float = 0.15
    pair_seconds: float = 0.5
    num_repetitions: int = 3
    num_pairs: int = LEAST_PAIRS
    num_engine_trials: int = 2
    rechecks_engines: bool = True
    request_sizes: tuple[int, ...] = (MIB // 4, MIB, 4 * MIB, 16 * MIB)
    depths: tuple[int, ...] = (4, 8, 16, 32)
    longest_fill_seconds: float = 60.0
    limit_seconds: float | None = None


FULL = Effort()
"""About two minutes with fio."""
QUICK = Effort(
    file_bytes=GIB // 2,
    sample_seconds=0.08,
    pair_seconds=0.25,
    num_repetitions=2,
    num_engine_trials=1,
    rechecks_engines=False,
    request_sizes=(MIB // 4, MIB, 4 * MIB),
    depths=(4, 8, 32),
    longest_fill_seconds=20.0,
    limit_seconds=50.0,
)
"""Under a minute with fio."""
