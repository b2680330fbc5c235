"""Random sequences of what users do, on random small models: equal to plain torch, bit for bit, or refused by name.

``python -m tests.fuzz.sequence FIRST COUNT`` runs more of them; a number that fails is a sequence that fails again.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.fuzz.sequence import run_sequence

_CHUNK = 25
_NUM_SEQUENCES = 2000
_MOST_REFUSED = 0.15
"""Of a chunk: else a change that refuses everything would pass."""


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("first", range(0, _NUM_SEQUENCES, _CHUNK))
def test_sequences_of_user_actions(first: int, tmp_path: Path) -> None:
    refusals = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that gradients were not finite, and the like, is not what is tested here
        for number in range(first, first + _CHUNK):
            directory = tmp_path / str(number)
            directory.mkdir()
            refusal = run_sequence(number, directory)
            if refusal is not None:
                refusals.append(f"{number}: {refusal}")
    assert len(refusals) <= _MOST_REFUSED * _CHUNK, "\n".join(refusals)
