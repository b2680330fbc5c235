"""What an engine works with; and what stands for its upper parts in the lower ones, which are made first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from infinity.checkpoint.state_access import StateAccess
from infinity.device.compute import ComputeDevice
from infinity.device.host_memory import HeapTrimmer
from infinity.distributed.meshes import Mesh
from infinity.engine.durable_run import DurableRun
from infinity.engine.resources import EngineResources
from infinity.gradients.listener import GradientListener
from infinity.optim.piece import PieceUpdater
from infinity.optim.template import Template
from infinity.paging.listener import PagerListener, WeightWriter
from infinity.paging.module_hooks import ModuleHooks
from infinity.paging.pager import Pager
from infinity.paging.parameter_handler import Gatherer, GradientHost, ParameterHandler
from infinity.plan.tracker import PlanTracker
from infinity.telemetry import Recording, Reporter, StepClock
from infinity.tiers.weight_exchange import WeightExchange
from infinity.updates.step_groups import StepGroups
from infinity.updates.stepper import Stepper
from infinity.updates.stream import UpdateStream
from infinity.vertical.step import StepContext

Part = TypeVar("Part")


class Late(Generic[Part]):
    """A part that is not there yet. Lower parts get this in their constructors, and call it for the one there is by now."""

    def __init__(self, until_then: Part) -> None:
        self._part = until_then
        self._is_connected = False

    def connect(self, part: Part) -> None:
        """It is ``part`` from now on, for good."""
        if self._is_connected:
            raise RuntimeError(f"{type(self._part).__name__} is connected already")
        self._part, self._is_connected = part, True

    def __call__(self) -> Part:
        """The part; before `connect`, what stands for it."""
        return self._part


class UpperParts:
    """All of them. See [How the engine hears of things] in ``infinity.paging.listener``."""

    def __init__(self) -> None:
        self.pager_listener = Late(PagerListener())
        self.gradient_listener = Late(GradientListener())
        self.writer: Late[WeightWriter | None] = Late(None)
        self.gradient_host: Late[GradientHost | None] = Late(None)
        self.gatherer: Late[Gatherer | None] = Late(None)


@dataclass(frozen=True)
class Parts:
    """Made by `infinity.initialize`, held by `infinity.engine.engine.Engine`."""

    mesh: Mesh
    """Who has which part of the model."""
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
    vertical: StepContext
    trimmer: HeapTrimmer | None
    """Where memory has to be given back between the pieces of a step."""
    upper: UpperParts
    durable: DurableRun | None
    """Commits each step, where the config wants that."""
