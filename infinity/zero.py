"""DeepSpeed's module ``zero``, as far as scripts need it: `GatheredParameters`, and an `Init` that changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import nn

from infinity.paging.gathered_parameters import GatheredParameters

logger = logging.getLogger(__name__)


class Init:
    """Models are built as they are without it, in host memory, and paged by `infinity.initialize`.

    A ``with`` block that does nothing. All arguments are taken; none has an effect.
    """

    _has_told = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not Init._has_told:
            Init._has_told = True
            logger.info("zero.Init: no effect, the model is built in host memory and paged by infinity.initialize")

    def __enter__(self) -> Init:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to undo."""


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


__all__ = ["GatheredParameters", "Init", "register_external_parameter", "set_z3_leaf_modules"]
