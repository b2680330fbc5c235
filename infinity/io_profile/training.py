"""What the drives' speed means for training a model: seconds per step, tokens that hide them, steps that wear allows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from infinity.io_profile.machine import FLOPS_PER_PARAMETER, FLOPS_WITH_CHECKPOINTING, measure_flops_per_second
from infinity.io_profile.model import ModelFacts

EXAMPLE_TBW = 600e12
"""Bytes; for an example that is called one."""


@dataclass(frozen=True)
class Outlook:
    """A model on these drives.

    Attributes:
        facts: the model and its bytes.
        bytes_per_second: of the mixed workload.
        given_tokens_per_second: of compute alone; None to measure what the device reaches at most.
        tbw_bytes: what the drives are rated to take in their life, all together; None if that is not known.
        num_drives: drives that share the writes.
    """

    facts: ModelFacts
    bytes_per_second: float
    given_tokens_per_second: float | None
    tbw_bytes: float | None
    num_drives: int

    def life_steps(self, tbw_bytes: float) -> float:
        """Steps until the drives have taken what they are rated for."""
        return tbw_bytes / self.facts.least.write

    def as_json(self) -> dict[str, Any]:
        """Plain values: everything that `lines` is made of."""
        facts, tokens_per_second = self.facts, self.given_tokens_per_second
        source = "given by --tokens-per-second"
        if tokens_per_second is None:
            flops, device = measure_flops_per_second()
            tokens_per_second = flops / (FLOPS_PER_PARAMETER * facts.num_parameters)
            source = f"estimated: {flops / 1e12:.2g} TFLOP/s on {device}, {FLOPS_PER_PARAMETER} per parameter and token"
        io_seconds = (facts.least.read + facts.least.write) / self.bytes_per_second
        return {
            "model": facts.name,
            "num_parameters": facts.num_parameters,
            "step_bytes": asdict(facts.least),
            "step_bytes_with_half_of_free_memory": None if facts.roomy is None else asdict(facts.roomy),
            "bytes_per_second": self.bytes_per_second,
            "io_seconds_per_step": io_seconds,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_from": source,
            "tokens_per_step_that_hide_io": io_seconds * tokens_per_second,
            "life_steps": None if self.tbw_bytes is None else self.life_steps(self.tbw_bytes),
        }

    def lines(self, values: dict[str, Any]) -> list[tuple[str, str]]:
        """(what, value) for the terminal.

        Args:
            values: what `as_json` gave.
        """
        least, roomy, count = self.facts.least, self.facts.roomy, self.facts.num_parameters
        io_seconds, tokens = values["io_seconds_per_step"], values["tokens_per_step_that_hide_io"]
        read, written = f"{least.read / 1e9:,.2f} GB read", f"{least.write / 1e9:,.2f} GB written"
        lines = [
            (
                "bytes per step",
                f"{read} ({least.read / count:.1f} B per parameter), {written} ({least.write / count:.1f} B)",
            )
        ]
        if roomy is not None and roomy.read + roomy.write < least.read + least.write:
            moved = f"{roomy.read / 1e9:,.2f} GB read, {roomy.write / 1e9:,.2f} GB written"
            words = f"{moved}, with a budget of {roomy.budget_bytes / 1e9:.1f} GB"
            lines.append(("  with more host memory", words))
        rate = f"{self.bytes_per_second / 1e9:.2f} GB/s (reads and writes mixed)"
        speed = f"{values['tokens_per_second']:,.1f} tokens/s ({values['tokens_per_second_from']})"
        lines.append(("seconds of I/O per step", f"{io_seconds:,.2f} s at {rate}"))
        lines.append(("compute hides it from", f"{tokens:,.0f} tokens per step, at {speed}"))
        if self.given_tokens_per_second is None:
            fewer = tokens * FLOPS_PER_PARAMETER / FLOPS_WITH_CHECKPOINTING
            words = "models reach less than a plain multiplication, so that fewer tokens do: give your own with"
            lines.append(("", f"{fewer:,.0f} with activation checkpointing; {words} --tokens-per-second"))
        life = f"{least.write / 1e9:,.2f} GB per step"
        if self.tbw_bytes is None:
            life += (
                f". Look up the rating (TBW) of your drive and give it with --tbw: one of {EXAMPLE_TBW / 1e12:.0f} TB, as an "
                f"example, lasts {self.life_steps(EXAMPLE_TBW):,.0f} steps"
            )
        else:
            steps = self.life_steps(self.tbw_bytes)
            drives = f" on {self.num_drives} drives" if self.num_drives > 1 else ""
            total = f"{self.tbw_bytes / 1e12:,.0f} TB written in all{drives}"
            life = f"{steps:,.0f} steps: {total}, {life} ({_duration(steps * io_seconds)} if I/O never stops)"
        return [*lines, ("life of the drives", life)]


def _duration(seconds: float) -> str:
    for length, name in ((365 * 86400, "years"), (86400, "days"), (3600, "hours")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {name}"
    return f"{seconds / 60:,.0f} minutes"
