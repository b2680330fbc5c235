"""Samples, their medians, and how far those can be trusted."""

from __future__ import annotations

import itertools

import pytest

from infinity.io_profile.fio import FioJob
from infinity.io_profile.grid import Point, setting_at
from infinity.io_profile.results import Results, median_interval
from infinity.io_profile.tables import _speed
from swapper.measure.io_setting import Workload
from tests.unit.io_profile.samples import fio_sample, results_of, sample

_MIB = 1 << 20


def test_the_interval_of_seven_is_smallest_to_largest() -> None:
    interval = median_interval([0.97, 1.01, 0.95, 1.2, 0.99, 1.0, 0.98])
    assert (interval.low, interval.high) == (0.95, 1.2)
    assert interval.level == pytest.approx(1 - 2 / 2**7)


@pytest.mark.parametrize("num_values", [3, 7, 9, 12])
def test_the_level_of_the_interval_is_that_of_coin_tosses(num_values: int) -> None:
    values = list(range(num_values))
    interval = median_interval(values)
    cut = int(interval.low)
    # The median lies inside unless too few or too many of the values fall below it.
    inside = sum(cut < sum(tosses) < num_values - cut for tosses in itertools.product((0, 1), repeat=num_values))
    assert interval.level == pytest.approx(inside / 2**num_values)
    assert interval.level >= 0.95 or cut == 0
    assert interval.high == num_values - 1 - cut


def test_more_values_give_a_narrower_interval() -> None:
    assert median_interval(range(20)).low > 0


def test_the_spread_is_half_the_range() -> None:
    setting = setting_at("threads", Point(_MIB, 8))
    assert _speed([sample(setting, Workload.READ, rate) for rate in (1e9, 2e9, 3e9)]) == "2.00 ±50"


def test_a_setting_is_compared_with_fios_best_at_its_size_and_depth() -> None:
    setting = setting_at("threads", Point(_MIB, 8))
    results = results_of({setting: 1e9})
    results.add_fio(fio_sample(FioJob("libaio", _MIB, 1, 8), Workload.READ, 2e9))
    results.add_fio(fio_sample(FioJob("psync", _MIB, 2, 8), Workload.READ, 4e9))
    results.add_fio(fio_sample(FioJob("libaio", _MIB, 1, 32), Workload.READ, 8e9))
    assert results.share_of_fio(setting, Workload.READ) == pytest.approx(0.25)
    assert results.share_of_fio(setting, Workload.WRITE) is None


def test_small_requests_take_no_part_in_the_comparison_of_the_best() -> None:
    small, large = setting_at("threads", Point(_MIB // 4, 8)), setting_at("threads", Point(_MIB, 8))
    assert results_of({small: 9e9, large: 1e9}).best(Workload.READ) == large


def test_the_same_point_as_fios_is_taken_only_where_it_is_as_good() -> None:
    best, near = setting_at("uring", Point(4 * _MIB, 8)), setting_at("threads", Point(_MIB, 4))
    point = Point(_MIB, 4)
    assert results_of({best: 1.00e9, near: 0.96e9}).best(Workload.READ, near=point) == near
    assert results_of({best: 1.00e9, near: 0.90e9}).best(Workload.READ, near=point) == best


def test_cores_are_stated_for_two_gigabytes_per_second_at_4_mib() -> None:
    setting = setting_at("uring", Point(4 * _MIB, 8))
    results = Results(request_sizes=(4 * _MIB,))
    results.add(sample(setting, Workload.READ, 4e9, cpu_seconds=0.5))
    assert results.cores_at_reference_rate("uring") == {Workload.READ: pytest.approx(0.25)}
    assert results.cores_at_reference_rate("threads") == {}
