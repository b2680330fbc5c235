"""What became of the tensors of some files and of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import WeightsMismatchError


@dataclass(frozen=True)
class Outcome:
    """Names; see `infinity.errors.WeightsMismatchError`."""

    missing: Sequence[str]
    unexpected: Sequence[str]
    mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
    of_another_kind: Sequence[tuple[str, str]]
    """What has a dtype that it must not have."""

    def check(
        self, path: Path, *, ignore_missing: bool, ignore_unexpected: bool, ignore_mismatched: bool
    ) -> dict[str, Any]:
        """All of it under transformers' names.

        Raises:
            WeightsMismatchError: something is there that is not to be ignored.
        """
        facts: dict[str, Any] = {
            "missing": () if ignore_missing else self.missing,
            "unexpected": () if ignore_unexpected else self.unexpected,
            "mismatched": () if ignore_mismatched else self.mismatched,
            "of_another_kind": self.of_another_kind,
        }
        if any(facts.values()):
            raise WeightsMismatchError(path, **facts)
        return {
            "missing_keys": set(self.missing),
            "unexpected_keys": set(self.unexpected),
            "mismatched_keys": set(self.mismatched),
            "error_msgs": [],
        }
