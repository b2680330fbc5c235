"""What the drives' speed means for training a model: seconds per step, tokens that hide them, steps that wear allows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .compute import FLOPS_PER_PARAMETER, FLOPS_WITH_CHECKPOINTING
from .model import ModelFacts

EXAMPLE_TBW = 600
"""TB; for an example that is called one."""


@dataclass(frozen=True)
class Outlook:
    """A model on these drives.

    Attributes:
        facts: the model and its bytes.
        bytes_per_second: of the mixed workload.
        tokens_per_second: of compute alone.
        compute_source: where that comes from, in words.
        tbw_bytes: what the drives are rated to take in their life, all together; None if that is not known.
        num_drives: drives that share the writes.
    """

    facts: ModelFacts
    bytes_per_second: float
    tokens_per_second: float
    compute_source: str
    is_compute_estimated: bool
    tbw_bytes: float | None
    num_drives: int

    @property
    def io_seconds(self) -> float:
        """Of one step."""
        return (self.facts.least.read + self.facts.least.write) / self.bytes_per_second

    @property
    def hiding_tokens(self) -> float:
        """Tokens per step at which compute takes as long as I/O."""
        return self.io_seconds * self.tokens_per_second

    def life_steps(self, tbw_bytes: float) -> float:
        """Steps until the drives have taken what they are rated for."""
        return tbw_bytes / self.facts.least.write

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.facts.name,
            "num_parameters": self.facts.num_parameters,
            "step_bytes": asdict(self.facts.least),
            "step_bytes_with_half_of_free_memory": None if self.facts.roomy is None else asdict(self.facts.roomy),
            "bytes_per_second": self.bytes_per_second,
            "io_seconds_per_step": self.io_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_from": self.compute_source,
            "tokens_per_step_that_hide_io": self.hiding_tokens,
            "life_steps": None if self.tbw_bytes is None else self.life_steps(self.tbw_bytes),
        }

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) for the terminal."""
        return [*self._byte_lines(), *self._time_lines(), *self._life_lines()]

    def _byte_lines(self) -> list[tuple[str, str]]:
        least, roomy, count = self.facts.least, self.facts.roomy, self.facts.num_parameters
        lines = [
            (
                "bytes per step",
                f"{least.read / 1e9:,.2f} GB read ({least.read / count:.1f} B per parameter), "
                f"{least.write / 1e9:,.2f} GB written ({least.write / count:.1f} B)",
            )
        ]
        if roomy is not None and roomy.read + roomy.write < least.read + least.write:
            lines.append(
                (
                    "  with more host memory",
                    f"{roomy.read / 1e9:,.2f} GB read, {roomy.write / 1e9:,.2f} GB written, with a budget of "
                    f"{roomy.budget_bytes / 1e9:.1f} GB",
                )
            )
        return lines

    def _time_lines(self) -> list[tuple[str, str]]:
        lines = [
            (
                "seconds of I/O per step",
                f"{self.io_seconds:,.2f} s at {self.bytes_per_second / 1e9:.2f} GB/s (reads and writes mixed)",
            ),
            (
                "compute hides it from",
                f"{self.hiding_tokens:,.0f} tokens per step, at {self.tokens_per_second:,.1f} tokens/s "
                f"({self.compute_source})",
            ),
        ]
        if self.is_compute_estimated:
            fewer = self.hiding_tokens * FLOPS_PER_PARAMETER / FLOPS_WITH_CHECKPOINTING
            lines.append(
                (
                    "",
                    f"{fewer:,.0f} with activation checkpointing; models reach less than a plain multiplication, so that "
                    "fewer tokens do: give your own with --tokens-per-second",
                )
            )
        return lines

    def _life_lines(self) -> list[tuple[str, str]]:
        written = f"{self.facts.least.write / 1e9:,.2f} GB per step"
        if self.tbw_bytes is not None:
            steps = self.life_steps(self.tbw_bytes)
            drives = f" on {self.num_drives} drives" if self.num_drives > 1 else ""
            return [
                (
                    "life of the drives",
                    f"{steps:,.0f} steps: {self.tbw_bytes / 1e12:,.0f} TB written in all{drives}, {written} "
                    f"({_duration(steps * self.io_seconds)} if I/O never stops)",
                )
            ]
        example = self.life_steps(EXAMPLE_TBW * 1e12)
        return [
            (
                "life of the drives",
                f"{written}. Look up the rating (TBW) of your drive and give it with --tbw: one of {EXAMPLE_TBW} TB, as an "
                f"example, lasts {example:,.0f} steps",
            )
        ]


def _duration(seconds: float) -> str:
    for length, name in ((365 * 86400, "years"), (86400, "days"), (3600, "hours")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {name}"
    return f"{seconds / 60:,.0f} minutes"
