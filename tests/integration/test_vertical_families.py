"""The families of transformers that go vertically, frozen as a list: none leaves it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.exactness.vertical_families import FAMILIES, listed, make, schedules


@pytest.mark.deep(but=6)
@pytest.mark.parametrize(
    ("name", "variant", "expected"), [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in listed()]
)
def test_a_family_goes_as_it_is_written(name: str, variant: str, expected: list[str], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library, about its configs
        model = make(FAMILIES[name], variant)
        assert model is not None
        found = [reason for _, reason in schedules(model, FAMILIES[name].batch, tmp_path)]
    assert found == expected
