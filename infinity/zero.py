"""DeepSpeed's module ``zero``, as far as scripts need it: `GatheredParameters` and `Init`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from infinity.loading.init import Init
from infinity.paging.gathered_parameters import GatheredParameters
from infinity.tiling import TiledLinear, TiledLinearReturnBias


def register_external_parameter(module: Any, parameter: Any) -> None:
    """Not needed: a parameter is fetched whoever uses it."""


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Not needed: what a module calls in another order each time is fetched all the same.

    Args:
        model: where to look.
        leaf_module_classes: classes, or their names.
        raise_if_not_found: whether there must be one.

    Returns:
        The modules of these classes.

    Raises:
        ValueError: there is none.
    """
    found = [module for module in model.modules() if {type(module), type(module).__name__} & set(leaf_module_classes)]
    if raise_if_not_found and not found:
        raise ValueError(f"the model has no module of {leaf_module_classes}")
    return found


__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "register_external_parameter",
    "set_z3_leaf_modules",
]
