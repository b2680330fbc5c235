"""Which settings are measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infinity.io_profile.advice import block_for, default_setting, reproduces
from infinity.io_profile.grid import FULL, QUICK, setting_at

_MIB = 1 << 20
_SMALL = replace(QUICK, request_sizes=(_MIB, 4 * _MIB), depths=(4, 8))


@pytest.mark.parametrize("effort", [FULL, QUICK])
def test_every_setting_can_be_put_into_a_config(effort: Any) -> None:
    for setting in effort.settings(("threads", "uring", "aiofiles")):
        assert reproduces(block_for(setting, is_direct=True), setting), setting


@pytest.mark.parametrize("effort", [FULL, QUICK])
def test_the_engines_default_is_among_what_is_measured(effort: Any) -> None:
    assert default_setting() in effort.settings(("threads",))


@pytest.mark.parametrize("backend", ["threads", "uring", "aiofiles"])
def test_as_many_requests_are_under_way_as_the_point_says(backend: Any) -> None:
    for point in FULL.points:
        assert setting_at(backend, point).num_inflight == point.depth


def test_all_settings_of_a_default_run_fit_into_its_file() -> None:
    for effort in (FULL, QUICK):
        assert effort.least_file_bytes <= effort.file_bytes


def test_the_portable_backend_gets_the_whole_grid_where_it_is_alone() -> None:
    assert _SMALL.points_for("aiofiles", ("aiofiles",)) == _SMALL.points
    assert len(_SMALL.points_for("aiofiles", ("threads", "aiofiles"))) < len(_SMALL.points)
