"""`GatheredParameters`: full weights in a ``with`` block."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import nn

from infinity.errors import ModelError
from infinity.loop.parameter_handler import ParameterHandler
from infinity.torch_internals.operations import leaves
from infinity.units.parameter import host_of
from infinity.units.tiles import TiledWeight


class GatheredParameters:
    """Inside the ``with`` block the parameters hold their full weights, and can be read and changed like any.

    Changes are stored when the block ends, also those of frozen parameters. Main weights follow: an element whose
    weight did not change keeps all its fp32 bits. With a ``modifier_rank``, contents are compared, so you may write in
    any way (NumPy, ``data_ptr()``, your own kernels). Without one, only writes that torch counts are stored: operations
    on the parameter, its ``.data`` or views of it.

    All units of the parameters are in memory at once: for a large model, gather it unit by unit. Parameters that no engine
    holds are left alone.

    Args:
        params: a parameter, or an iterable of them, of one or more models.
        modifier_rank: with several processes: when the block ends, all get this rank's values. None: each keeps its
            own, which must be the same. All ranks enter and leave the block. As in DeepSpeed, the number is that among
            the processes with the same part of the model.
        fwd_module, enabled: accepted for compatibility; ``enabled=False`` does nothing at all.

    Raises:
        BudgetTooSmallError: the units do not fit into the part of the budget for weights.
        ModelError: one of them is used tile by tile (``infinity.tile_above``).
        StepError: between ``engine.backward()`` and ``engine.step()``, when updates run in backward.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        found = leaves(params if isinstance(params, nn.Parameter) else list(params))
        self._parameters: list[nn.Parameter] = [leaf for leaf in found if isinstance(leaf, nn.Parameter)]
        self._enabled = enabled
        self._modifier_rank = modifier_rank
        self._gatherers: list[Any] = []
        """`ConsistentAccess` of each engine that holds some of the parameters, from `__enter__` on."""
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        if not self._enabled:
            return
        by_host: dict[int, tuple[Any, list[nn.Parameter]]] = {}
        for parameter in self._parameters:
            if isinstance(parameter, TiledWeight):
                raise parameter.tiles.tiled.access_error("GatheredParameters")
            host = host_of(parameter)
            if host is None:
                continue
            if not isinstance(host, ParameterHandler):
                raise ModelError("the engine that holds these parameters is not ready")
            by_host.setdefault(id(host), (host.gatherer, []))[1].append(parameter)
        # If a second engine refuses, the first one's block is closed again.
        with contextlib.ExitStack() as stack:
            for gatherer, parameters in by_host.values():
                stack.enter_context(gatherer.gathered(parameters, compares=self._modifier_rank is not None))
            self._gatherers = [gatherer for gatherer, _ in by_host.values()]
            self._open = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            # Before the gatherers' blocks end, which store the weights. After an exception, ranks may be at other
            # places and must not meet.
            if kind is None and self._modifier_rank is not None:
                self._broadcast_from(self._modifier_rank)

    def _broadcast_from(self, rank: int) -> None:
        what = f"GatheredParameters(..., modifier_rank={rank})"
        for engine in self._gatherers:
            held = [each for each in self._parameters if getattr(host_of(each), "gatherer", None) is engine]
            # Ranks that gather other parameters get an error here, and not a hang in the broadcast.
            engine.data_ranks.all_gather_ints(what, [parameter.numel() for parameter in held])
            for parameter in held:
                engine.data_ranks.broadcast_from(what, rank, parameter.data)
