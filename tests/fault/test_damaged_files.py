"""Damaged and hostile files of every format end in success or in one of the packages' errors: see `tests.fuzz.files`."""

from __future__ import annotations

import pytest

from tests.fuzz.files import FORMATS, run

_FEW, _MANY = 25, 5000


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_errors(name: str, pytestconfig: pytest.Config) -> None:
    is_all = pytestconfig.getoption("--all", default=False)
    found = run(name, 0, _MANY if is_all else _FEW)
    assert not found.failures, "\n".join(f"file {number}: {problem}" for number, problem in found.failures.items())
