"""The one step of a training that is profiled, as the config's ``flops_profiler`` says."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from infinity.config.schema.blocks import FlopsProfilerBlock
from infinity.deepspeed.profiler.flops_profiler import FlopsProfiler

logger = logging.getLogger(__name__)


class ProfiledStep:
    """Counts each training forward of the step, and shows the last one when the step is made."""

    def __init__(self, model: nn.Module, section: FlopsProfilerBlock, engine: Any) -> None:
        """
        Args:
            model: of the engine.
            section: when, and what is printed.
            engine: has sizes and the report of the step.
        """
        self.profiler = FlopsProfiler(model, engine, section.recompute_fwd_factor)
        self._section = section

    def is_due(self, num_steps: int) -> bool:
        """Whether the step that comes after so many is the one."""
        return num_steps == self._section.profile_step

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A forward inside is counted, and what was counted before is forgotten."""
        self.profiler.start_profile()
        try:
            yield
        finally:
            self.profiler.stop_profile()

    def show(self) -> None:
        """Print what was counted, once. A file that cannot be written is told: a training does not end for it."""
        section = self._section
        try:
            self.profiler.print_model_profile(
                section.profile_step,
                section.module_depth,
                section.top_modules,
                section.detailed,
                section.output_file,
            )
        except OSError as error:
            logger.warning(
                "the profile was not written: %s. Name a file that can be, in flops_profiler.output_file", error
            )
        self.profiler.end_profile()
