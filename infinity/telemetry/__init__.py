"""What a step did and what it waited for."""

from infinity.telemetry.clock import StepClock
from infinity.telemetry.report import StepReport

__all__ = ["StepClock", "StepReport"]
