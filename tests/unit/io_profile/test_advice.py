"""The settings that a measurement speaks for."""

from __future__ import annotations

import json

import pytest

from infinity.config import load_config
from infinity.io_profile.advice import advise, default_setting
from infinity.io_profile.grid import Point, setting_at
from infinity.io_profile.results import Results
from swapper.measure.io_setting import Workload
from tests.unit.io_profile.samples import results_of, sample

_MIB = 1 << 20


def test_the_default_stays_where_nothing_is_better() -> None:
    default, other = default_setting(), setting_at("uring", Point(4 * _MIB, 8))
    advice = advise(results_of({default: 1.00e9, other: 1.03e9}), is_direct=True)
    assert advice is not None
    assert advice.setting == default
    assert advice.default_share == 1.0


def test_a_backend_that_proves_itself_faster_is_taken() -> None:
    default, faster = default_setting(), setting_at("uring", Point(4 * _MIB, 8))
    results = results_of({default: 1.0e9, faster: 1.3e9})
    results.backends["aiofiles"] = "no such library"
    advice = advise(results, is_direct=True)
    assert advice is not None
    assert advice.setting == faster
    io = load_config(json.loads(json.dumps(advice.block)) | {"train_batch_size": 1}, check_storage=False).io
    assert (io.backend, io.request_bytes, io.num_threads, io.max_inflight, io.direct) == (
        "uring",
        4 * _MIB,
        faster.num_threads,
        faster.max_inflight,
        True,
    )
    assert advice.default_share == pytest.approx(1 / 1.3)
    reasons = dict(advice.reasons)
    assert set(reasons) == {f"{block}.{key}" for block, values in advice.block.items() for key in values}
    assert "aiofiles cannot be used here" in reasons["infinity.io_backend"]


def test_requests_longer_than_the_engines_are_not_recommended() -> None:
    long, useful = setting_at("threads", Point(16 * _MIB, 8)), setting_at("threads", Point(4 * _MIB, 8))
    advice = advise(results_of({long: 2e9, useful: 1e9}), is_direct=False)
    assert advice is not None
    assert advice.setting == useful
    assert advice.block["infinity"]["direct_io"] is False


def test_a_sweep_without_all_workloads_gives_no_advice() -> None:
    results = Results(request_sizes=(_MIB,))
    results.add(sample(default_setting(), Workload.READ, 1e9))
    assert advise(results, is_direct=True) is None
