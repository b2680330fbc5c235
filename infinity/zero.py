"""DeepSpeed's module ``zero``, as far as scripts need it: `GatheredParameters`, and an `Init` that changes nothing."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

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


__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
