"""The search for the largest model, and one try of it at a tiny limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.cgroup import why_unavailable
from bench.measured.models import Workload
from bench_scale import Try, attempt, largest, ways


def _search(fits: int) -> tuple[int, int | None, list[int]]:
    tried: list[int] = []

    def attempt_with(layers: int) -> Try:
        tried.append(layers)
        return Try(layers, layers * 10, 1.0, 100) if layers <= fits else Try(layers, problem="too large")

    found = largest("a way", 64, attempt_with)
    return found.best.num_layers, found.next and found.next.num_layers, tried


@pytest.mark.parametrize("fits", range(0, 40))
def test_the_largest_is_found_in_few_tries(fits: int) -> None:
    best, following, tried = _search(fits)
    assert (best, following) == (fits, fits + 1)
    assert len(set(tried)) == len(tried) <= 2 * fits.bit_length() + 2


@pytest.mark.deep
def test_a_model_that_trains_and_one_that_the_kernel_ends(nvme_dir: Path) -> None:
    reason = why_unavailable("memory")
    if reason is not None:
        pytest.skip(reason)
    workload = Workload(model="tiny", num_layers=1, seq_len=8)
    for limit, trains in ((2 << 30, True), (32 << 20, False)):
        made = attempt(ways(limit, ())["plain torch"], workload, nvme_dir, 1)
        if trains:
            assert made.problem is None and made.seconds_per_step > 0
            assert 50e6 < made.peak_bytes < limit
            assert made.num_parameters > 200_000
        else:
            assert made.problem is not None and "memory limit of 0.03 GB" in made.problem
    assert not list(Path("/sys/fs/cgroup").rglob("infinity_bench_*_in_memory"))
    assert list(nvme_dir.iterdir()) == []
