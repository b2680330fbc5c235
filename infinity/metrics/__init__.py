"""Measures a run: seconds and bytes of each step, a timeline, the log of the run, curves for monitors."""

from infinity.metrics.report import StepReport
from infinity.metrics.run_log import Mark, Run, RunLog, RunReader, read_run, showing

__all__ = ["Mark", "Run", "RunLog", "RunReader", "StepReport", "read_run", "showing"]
