"""Optimizers whose state lies outside memory.

A `Template` holds the hyperparameters that users and learning rate schedulers see. A `PieceUpdater` runs the same
optimizer class on pieces of parameters, wherever their state comes from. `PagedOptimizer` is the face: a torch
optimizer that delegates to a `StepBackend`.
"""

from infinity.numerics.state_format import StateFormat
from infinity.numerics.state_window import StateWindow
from infinity.optim.facade.loose_parameters import LooseParameters
from infinity.optim.facade.no_optimizer import absent_template
from infinity.optim.facade.paged_optimizer import PagedOptimizer, StepBackend
from infinity.optim.fused_adam import FusedAdam
from infinity.optim.groups import Groups
from infinity.optim.lion import Lion
from infinity.optim.main_weights import MAIN_WEIGHT
from infinity.optim.piece import PIECE_ALIGNMENT, PieceUpdater
from infinity.optim.registry import OptimizerSection
from infinity.optim.remainder_updater import RemainderUpdater
from infinity.optim.state_support import check_state_format
from infinity.optim.template import OptimizerSource, Template, build_template

__all__ = [
    "MAIN_WEIGHT",
    "PIECE_ALIGNMENT",
    "FusedAdam",
    "Groups",
    "Lion",
    "LooseParameters",
    "OptimizerSection",
    "OptimizerSource",
    "PagedOptimizer",
    "PieceUpdater",
    "RemainderUpdater",
    "StateFormat",
    "StateWindow",
    "StepBackend",
    "Template",
    "absent_template",
    "build_template",
    "check_state_format",
]
