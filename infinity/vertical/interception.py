"""Which modules are computed as a whole, and how the schedule gets hold of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from infinity.activations.recomputation import RecomputedForward
from infinity.loop.module_hooks import ModuleHooks
from infinity.paging.parameter_map import ParameterMap
from infinity.units.unit import Unit
from infinity.vertical.call import Block

Handler = Callable[[Block, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Interception:
    """Puts a handler in the place of the forwards of all modules that lie in a block."""

    def __init__(self, parameter_map: ParameterMap, module_hooks: ModuleHooks, blocks: Sequence[str]) -> None:
        """``blocks``: FQNs of the modules that were made units of their own."""
        self._model = parameter_map.model
        self._module_hooks = module_hooks
        self.blocks: list[Block] = []
        """The modules, each before its descendants."""
        self._undo = ExitStack()
        """Puts the modules back as they were."""
        modules = dict(parameter_map.model.named_modules())
        for block in blocks:
            home = _home(parameter_map, modules[block])
            if home is None:
                continue
            for name, module in modules[block].named_modules(prefix=block):
                units = {parameter_map.locate(p)[0].index for p in module.parameters() if parameter_map.holds(p)}
                if home.index in units and not isinstance(module, torch.jit.ScriptModule):
                    self.blocks.append(Block(name, module, home))
        self.unit_indices = {block.unit.index for block in self.blocks}

    @contextmanager
    def active(self, handler: Handler) -> Iterator[None]:
        """Inside the ``with`` block ``handler`` is called in place of the modules' forwards, which it gets."""
        with self._undo:
            relieved: list[Any] = [module for module in self._model.modules() if _checkpoints_itself(module)]
            for module in relieved:
                self._undo.callback(setattr, module, "gradient_checkpointing", True)
                module.gradient_checkpointing = False
            for block in self.blocks:
                if id(block.module) in self._module_hooks.covered:
                    continue  # its forward is part of a compiled one
                attributes, forward = block.module.__dict__, block.module.forward
                if "forward" in attributes:
                    self._undo.callback(attributes.__setitem__, "forward", forward)
                else:
                    self._undo.callback(attributes.pop, "forward", None)
                # Without the engine's own checkpointing: units are recomputed anyway.
                computing = forward.forward if isinstance(forward, RecomputedForward) else forward
                attributes["forward"] = _wrap(handler, block, computing)
            yield

    def restore(self) -> None:
        """The modules are as they were, however `active` was left. May be repeated."""
        self._undo.close()


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
