"""What an engine works with."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.checkpoint.state_access import StateAccess
from infinity.checkpoint.stored_weights import StoredWeights
from infinity.device.compute import ComputeDevice
from infinity.distributed.meshes import Mesh
from infinity.engine.durable_run import DurableRun
from infinity.engine.resources import EngineResources
from infinity.engine.settled_access import SettledAccess
from infinity.gradients.live_gradients import LiveGradients
from infinity.loop.accumulation import Accumulation
from infinity.loop.backward import Backwards
from infinity.loop.module_hooks import ModuleHooks
from infinity.loop.pager import Pager, Preconditions
from infinity.loop.parameter_handler import ParameterHandler
from infinity.loop.phase import PhaseGuard
from infinity.loop.style import LoopStyle
from infinity.optim.piece import PieceUpdater
from infinity.optim.template import Template
from infinity.paging.parameter_map import ParameterMap
from infinity.plan.tracker import PlanTracker
from infinity.telemetry import Recording, Reporter, StepClock
from infinity.tiers.weight_exchange import WeightExchange
from infinity.updates.step_groups import StepGroups
from infinity.updates.stepper import Stepper
from infinity.updates.stream import UpdateStream
from infinity.vertical.step import StepContext


@dataclass(frozen=True)
class Parts:
    """Made by `infinity.initialize`, held by `infinity.engine.engine.Engine`."""

    mesh: Mesh
    """Who has which part of the model."""
    counts: Accumulation
    style: LoopStyle
    guard: PhaseGuard
    preconditions: Preconditions
    backwards: Backwards
    parameter_map: ParameterMap
    module_hooks: ModuleHooks
    parameter_handler: ParameterHandler
    pager: Pager
    storage: EngineResources
    stream: UpdateStream
    stepper: Stepper
    live: LiveGradients
    groups: StepGroups
    stored: StoredWeights
    access: StateAccess
    settled: SettledAccess
    exchange: WeightExchange
    template: Template
    updater: PieceUpdater
    clock: StepClock
    reporter: Reporter
    recording: Recording | None
    plan_tracker: PlanTracker
    device: ComputeDevice
    vertical: StepContext
    durable: DurableRun | None
    """Commits each step, where the config wants that."""

    @property
    def mains(self) -> SettledAccess | None:
        """Has the main weights, where those are something else than model weights."""
        return self.settled if self.stored.has_main_weights else None
