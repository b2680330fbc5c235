"""DeepSpeed's module ``zero``, as far as scripts need it: `GatheredParameters` and `Init`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from infinity.deepspeed.contents.leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
from infinity.loading.init import Init as Init
from infinity.loop.gathered_parameters import GatheredParameters as GatheredParameters
from infinity.units.parameter import ZeroParamStatus as ZeroParamStatus

MiCS_Init = Init
"""The same as `Init`: `infinity.initialize` divides weights among all processes with the same part of the model."""


class ZeroParamType(Enum):
    """DeepSpeed's kinds of parameters."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def register_external_parameter(module: Any, parameter: Any) -> None:
    """No effect: a parameter is fetched whichever module uses it."""


def unregister_external_parameter(module: Any, parameter: Any) -> None:
    """As `register_external_parameter`."""


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Returns ``model`` as it is: it generates with paged weights, without gathering."""
    yield model
