"""Damaged and hostile files of every format end in success or in one of the packages' errors: see `tests.fuzz.files`."""

from __future__ import annotations

import pytest

from tests.fuzz.files import FORMATS, run

_FEW, _CHUNK, _NUM_CHUNKS = 25, 500, 10


@pytest.mark.parametrize("chunk", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in range(1, _NUM_CHUNKS))])
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_errors(name: str, chunk: int, pytestconfig: pytest.Config) -> None:
    is_all = pytestconfig.getoption("--all", default=False)
    failures = run(name, chunk * _CHUNK, _CHUNK if is_all else _FEW)
    assert not failures, "\n".join(f"file {number}: {problem}" for number, problem in failures.items())
