"""What a step did and what it waited for."""

from infinity.telemetry.clock import StepClock
from infinity.telemetry.report import StepReport
from infinity.telemetry.reporter import Reporter

__all__ = ["Reporter", "StepClock", "StepReport"]
