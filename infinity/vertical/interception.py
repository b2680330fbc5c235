"""Which modules are computed as a whole, and how the schedule gets hold of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from infinity.activations.recomputation import RecomputedForward
from infinity.loop.module_hooks import ModuleHooks
from infinity.paging.parameter_map import ParameterMap
from infinity.units.unit import Unit
from infinity.vertical.call import Block

Handler = Callable[[Block, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_ABSENT: Any = object()


class Interception:
    """Puts a handler in the place of the forwards of all modules that lie in a block."""

    def __init__(self, parameter_map: ParameterMap, module_hooks: ModuleHooks, blocks: Sequence[str]) -> None:
        """``blocks``: FQNs of the modules that were made units of their own."""
        self._model = parameter_map.model
        self._module_hooks = module_hooks
        self.blocks: list[Block] = []
        """The modules, each before its descendants."""
        self._before: list[tuple[nn.Module, Any]] = []
        self._relieved: list[Any] = []
        modules = dict(parameter_map.model.named_modules())
        for block in blocks:
            home = _home(parameter_map, modules[block])
            if home is None:
                continue
            for name, module in modules[block].named_modules(prefix=block):
                units = {parameter_map.locate(p)[0].index for p in module.parameters() if parameter_map.holds(p)}
                if home.index in units and not isinstance(module, torch.jit.ScriptModule):
                    self.blocks.append(Block(name, module, home))
        self._units = {block.unit.index for block in self.blocks}

    def is_unit(self, unit: Unit) -> bool:
        """Whether ``unit`` is that of a block."""
        return unit.index in self._units

    @contextmanager
    def active(self, handler: Handler) -> Iterator[None]:
        """Inside the ``with`` block ``handler`` is called in place of the modules' forwards, which it gets."""
        try:
            for module in self._model.modules():
                if _checkpoints_itself(module):
                    self._relieved.append(module)
                    self._relieved[-1].gradient_checkpointing = False
            for block in self.blocks:
                if id(block.module) in self._module_hooks.covered:
                    continue  # its forward is part of a compiled one
                attributes = block.module.__dict__
                self._before.append((block.module, attributes.get("forward", _ABSENT)))
                forward = block.module.forward
                # Without the engine's own checkpointing: units are recomputed anyway.
                computing = forward.forward if isinstance(forward, RecomputedForward) else forward
                attributes["forward"] = _wrap(handler, block, computing)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """The modules are as they were, however `active` was left. May be repeated."""
        while self._before:
            module, forward = self._before[-1]
            if forward is _ABSENT:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
            del self._before[-1]
        while self._relieved:
            self._relieved[-1].gradient_checkpointing = True
            del self._relieved[-1]


def _wrap(handler: Handler, block: Block, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(block, forward, args, kwargs)

    return call


def _home(parameter_map: ParameterMap, block: nn.Module) -> Unit | None:
    """The unit that holds parameters of this block only."""
    inside = {id(parameter) for parameter in block.parameters()}
    for parameter in filter(parameter_map.holds, block.parameters()):
        unit = parameter_map.locate(parameter)[0]
        if all(id(other) in inside for other in unit.parameters):
            return unit
    return None


def _checkpoints_itself(module: Any) -> bool:
    """Whether a layer of transformers would be recomputed once more inside a recomputation.

    The reentrant kind is left as it is: it gives other gradients where no input needs one.
    """
    function = getattr(module, "_gradient_checkpointing_func", None)
    use_reentrant = getattr(function, "keywords", {}).get("use_reentrant")
    return getattr(module, "gradient_checkpointing", None) is True and use_reentrant is False
