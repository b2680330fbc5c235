"""What fits and what does not between the tensors of files and a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ModelError


@dataclass(frozen=True)
class Outcome:
    """Differences between a model and the files it is loaded from. Names are the model's, or else the files'."""

    missing: Sequence[str]
    """In the model, but not in the files."""
    unexpected: Sequence[str]
    """In the files, but not in the model."""
    mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
    """Name, shape in the files, shape in the model."""
    of_another_kind: Sequence[tuple[str, str]]
    """Name and dtype in the files, of floating-point tensors that the files have as integers, or only with scales."""

    def check(
        self, path: Path, *, ignore_missing: bool, ignore_unexpected: bool, ignore_mismatched: bool
    ) -> dict[str, Any]:
        """Raise if tensors do not fit. Returns all differences under transformers' names.

        Raises:
            ModelError: there is a difference that the caller does not ignore.
        """
        missing = () if ignore_missing else self.missing
        unexpected = () if ignore_unexpected else self.unexpected
        refused = [(name, f"missing: {name} (ignore_missing_keys=True makes it anew)") for name in missing]
        refused += [
            (name, f"not in the model: {name} (ignore_unexpected_keys=True leaves it out)") for name in unexpected
        ]
        refused += [
            (
                name,
                f"of another shape: {name} is {there}, the model's is {here} (ignore_mismatched_sizes=True makes it anew)",
            )
            for name, there, here in (() if ignore_mismatched else self.mismatched)
        ]
        refused += [
            (name, f"not floating-point, or only with scales: {name} is {dtype}")
            for name, dtype in self.of_another_kind
        ]
        if refused:
            lines = [*(line for _, line in refused), *_on_prefixes(missing, unexpected)]
            raise ModelError(
                f"the weights in '{path}' are not the model's:\n  " + "\n  ".join(lines), fqn=refused[0][0]
            )
        return {
            "missing_keys": set(self.missing),
            "unexpected_keys": set(self.unexpected),
            "mismatched_keys": set(self.mismatched),
            "error_msgs": [],
        }


def _on_prefixes(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """The cure if all names in the files have one prefix more (DDP, torch.compile), or lack one of the model's."""
    for longer, shorter, is_extra in ((unexpected, missing, True), (missing, unexpected, False)):
        # Files of a DDP model: unexpected = ["module.a.weight", ...], missing = ["a.weight", ...]. The first missing
        # name gives the prefix "module.", which all unexpected names have: the cure is key_mapping={"^module\\.": ""}.
        found = (name.removesuffix(each) for each in shorter[:1] for name in longer if name.endswith(f".{each}"))
        for prefix in found:
            if all(name.startswith(prefix) for name in longer):
                pattern = "^" + prefix.replace(".", "\\.")
                mapping = {pattern: ""} if is_extra else {"^": prefix}
                lack = "all begin with" if is_extra else "lack"
                return [f"the names in the files {lack} '{prefix}': pass key_mapping={mapping!r}"]
    return []
