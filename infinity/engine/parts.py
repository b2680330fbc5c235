"""What an engine works with."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.checkpoint.state_access import StateAccess
from infinity.device.compute import ComputeDevice
from infinity.device.host_memory import HeapTrimmer
from infinity.engine.durable_run import DurableRun
from infinity.engine.late import UpperParts
from infinity.engine.resources import EngineResources
from infinity.optim.piece import PieceUpdater
from infinity.optim.template import Template
from infinity.paging.module_hooks import ModuleHooks
from infinity.paging.pager import Pager
from infinity.paging.parameter_handler import ParameterHandler
from infinity.planning.plan_tracker import PlanTracker
from infinity.telemetry import Recording, Reporter, StepClock
from infinity.tiers.weight_exchange import WeightExchange
from infinity.updates.step_groups import StepGroups
from infinity.updates.stepper import Stepper
from infinity.updates.stream import UpdateStream
from infinity.vertical.step import Surroundings


@dataclass(frozen=True)
class Parts:
    """Made by `infinity.initialize`, held by `infinity.engine.engine.Engine`."""

    module_hooks: ModuleHooks
    parameter_handler: ParameterHandler
    pager: Pager
    storage: EngineResources
    stream: UpdateStream
    stepper: Stepper
    groups: StepGroups
    access: StateAccess
    exchange: WeightExchange
    template: Template
    updater: PieceUpdater
    clock: StepClock
    reporter: Reporter
    recording: Recording | None
    plan_tracker: PlanTracker
    device: ComputeDevice
    vertical: Surroundings
    trimmer: HeapTrimmer | None
    """Where memory has to be given back between the pieces of a step."""
    upper: UpperParts
    durable: DurableRun | None
    """Commits each step, where the config wants that."""
