"""What an engine works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.access import StateAccess
from infinity.forecast import Forecast
from infinity.holding import ModelHolding
from infinity.optim import PieceUpdater, Template
from infinity.residence import Residence
from infinity.step_groups import StepGroups
from infinity.stepper import Stepper
from infinity.storage import Storage
from infinity.telemetry import Recording, Reporter, StepClock
from infinity.update import UpdateStream
from infinity.vertical import SharedPager, Surroundings


@dataclass(frozen=True)
class Parts:
    """Made by `infinity.initialize`, held by `infinity.engine.Engine`."""

    holding: ModelHolding
    residence: Residence
    pager: SharedPager
    storage: Storage
    stream: UpdateStream
    stepper: Stepper
    groups: StepGroups
    access: StateAccess
    template: Template
    updater: PieceUpdater
    clock: StepClock
    reporter: Reporter
    recording: Recording | None
    forecast: Forecast
    device: torch.device
    vertical: Surroundings
