"""Tests that must fail, also under `python -O`. Not collected by name: tools/test.sh runs them and insists.

If one of them passes, a run under `python -O` would pass whatever the code does.
"""

from __future__ import annotations

import pytest


def test_assert_in_a_test_file() -> None:
    assert 1 + 1 == 3


def test_helper_that_raises() -> None:
    pytest.fail("raised by a helper, without an assert statement")
