"""Which optimizers' states may be stored rounded, and which may be parted."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from infinity.errors import ConfigError, OptimizerNotPageableError
from infinity.numerics.state_format import StateFormat
from infinity.optim.classes.lion import Lion
from infinity.optim.piece import PieceUpdater
from infinity.optim.template import Template

_KEY = "infinity.state_dtype"
_ONE_BYTE: dict[type[Optimizer], frozenset[str]] = {
    torch.optim.Adam: frozenset({"exp_avg", "exp_avg_sq"}),
    torch.optim.AdamW: frozenset({"exp_avg", "exp_avg_sq"}),
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    Lion: frozenset({"exp_avg"}),
}
"""Running means, which forget what rounding did to them."""


def check_parts(template: Template, updater: PieceUpdater, zero_stage: int, *, is_divided: bool) -> None:
    """Refuse parts of parameters where the optimizer wants whole ones.

    Raises:
        OptimizerNotPageableError: ranks have parts of the states (``is_divided``) or of DTensors, or layers are paged in tiles.
    """
    if not updater.mixes_elements:
        return
    if any(getattr(param, "is_part_of_dtensor", False) for param in template.params()):
        raise OptimizerNotPageableError(
            template.name,
            "it updates whole parameters, and with tensor parallelism by DTensors each rank has a part of them",
            cure="Take an optimizer that treats every element by itself (AdamW, SGD, Lion), or do not divide the model",
        )
    if is_divided:
        raise OptimizerNotPageableError(
            template.name,
            f"it updates whole parameters, and with zero_optimization.stage {zero_stage} each rank has a part of them",
            cure="Set zero_optimization.stage to 0: each rank then pages all states, and they train as one",
        )
    if template.tiled.tiled:
        raise OptimizerNotPageableError(
            template.name,
            "it updates whole parameters, and infinity.tile_above makes several of one",
            cure="Remove infinity.tile_above",
        )


def check_state_format(form: StateFormat, template: Template, updater: PieceUpdater) -> None:
    """Refuse what rounding would break.

    Raises:
        ConfigError: the optimizer updates whole parameters, or takes a root of a difference of two states (RMSprop with
            ``centered``), which rounding makes negative; or, with ``INT8``, it is not one of Adam, AdamW, SGD and Lion, or keeps
            a maximum (``amsgrad``), which grows with every rounding up.
    """
    if form is StateFormat.FP32:
        return
    cls = type(template.optimizer)
    if updater.mixes_elements:
        raise ConfigError.value(
            _KEY,
            form.value,
            f"rounded states are opened part by part, and {cls.__name__} updates whole parameters",
            cure='Set it to "fp32"',
        )
    for index, group in enumerate(template.param_groups):
        if isinstance(template.optimizer, torch.optim.RMSprop) and group.get("centered"):
            raise ConfigError.value(
                _KEY,
                form.value,
                f"{cls.__name__} with centered=True takes the root of a difference of two states, and between rounded ones that "
                "may be negative",
                cure='Set it to "fp32", or centered to false',
            )
        names = updater.state_names(index)
        refused = [name for name in names if name not in _ONE_BYTE.get(cls, frozenset())]
        if form is StateFormat.INT8 and refused:
            raise ConfigError.value(
                _KEY,
                form.value,
                f"one byte per element is for the running means of Adam, AdamW, SGD and Lion, and {cls.__name__} keeps "
                f"'{refused[0]}'",
                cure='Set it to "bf16" or "fp32"' + (", or amsgrad to false" if group.get("amsgrad") else ""),
            )
