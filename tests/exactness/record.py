"""What a training run leaves to compare, and the first place where two runs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Snapshot:
    """All that a model and its optimizer are, by FQN, as copies.

    ``state`` holds per-element tensors and scalars alike; a parameter that was never updated has an empty entry.
    """

    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    main_weights: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]

    @classmethod
    def copied(
        cls,
        *,
        weights: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        main_weights: Mapping[str, torch.Tensor],
        state: Mapping[str, Mapping[str, Any]],
    ) -> Snapshot:
        """Copies of everything; state that is a plain number becomes a tensor."""
        return cls(
            weights=_copies(weights),
            buffers=_copies(buffers),
            main_weights=_copies(main_weights),
            state={fqn: _copies(entries) for fqn, entries in state.items()},
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with a path that says what it is."""
        for kind in ("weights", "buffers", "main_weights"):
            for fqn, tensor in getattr(self, kind).items():
                yield f"{kind}[{fqn}]", tensor
        for fqn, entries in self.state.items():
            for name, tensor in sorted(entries.items()):
                yield f"state[{fqn}][{name}]", tensor


@dataclass
class Record:
    """A run: what happened in order, then what was left."""

    events: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    final: Snapshot | None = None

    def note(self, what: str, value: torch.Tensor) -> None:
        self.events.append((what, value.detach().clone().cpu()))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.events
        if self.final is not None:
            yield from self.final.tensors()


class Difference(AssertionError):
    """Two runs that had to be equal are not. Raised, not asserted: assertions vanish under ``python -O``."""


def require_equal(expected: Record, actual: Record, *, context: str = "") -> None:
    """Raise :class:`Difference` that shows the first of all differences, and how many tensors differ."""
    wanted, got = dict(expected.tensors()), dict(actual.tensors())
    if len(wanted) != sum(1 for _ in expected.tensors()):
        raise ValueError("a record names two things alike")
    lines = [
        *(f"{path}: missing" for path in wanted if path not in got),
        *(f"{path}: not expected" for path in got if path not in wanted),
    ]
    # In the order of the run: what differs first is the cause, the rest follows from it.
    for path in wanted:
        if path in got and (line := describe_difference(wanted[path], got[path])):
            lines.append(f"{path}: {line}")
    if lines:
        shown = "\n  ".join(lines[:12])
        more = f"\n  and {len(lines) - 12} more" if len(lines) > 12 else ""
        raise Difference(f"{context}\n{len(lines)} of {len(wanted)} differ from plain torch:\n  {shown}{more}".strip())


def describe_difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """Where and by how much two tensors differ, or an empty string."""
    for attribute in ("dtype", "shape"):
        if getattr(expected, attribute) != getattr(actual, attribute):
            return f"{attribute} {getattr(actual, attribute)}, expected {getattr(expected, attribute)}"
    actual = actual.detach().to(expected.device)
    if torch.equal(expected, actual):
        return ""
    unequal = expected != actual
    if not unequal.any():
        return "an empty tensor that torch.equal does not take for equal"
    first = tuple(unequal.nonzero()[0].tolist())
    a, b = expected[first].item(), actual[first].item()
    return f"{int(unequal.sum())} of {expected.numel()} elements, first at {list(first)}: {b!r}, expected {a!r}"


def _copies(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value).detach().clone().cpu() for name, value in values.items()}
