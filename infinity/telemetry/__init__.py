"""What a step did and what it waited for."""

from infinity.telemetry.clock import StepClock
from infinity.telemetry.recording import Recording
from infinity.telemetry.report import StepReport
from infinity.telemetry.reporter import DriveCounters, Reporter, Sources

__all__ = ["DriveCounters", "Recording", "Reporter", "Sources", "StepClock", "StepReport"]
