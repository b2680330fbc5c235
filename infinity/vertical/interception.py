"""Intercepts the calls of blocks during a vertical step, by replacing ``forward`` of their modules."""

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
    """Replaces the forwards of all blocks, and of the modules in them, by a handler."""

    # Modules inside a block are included for calls from outside of its forward, as when a model calls
    # `self.layers[0].norm(x)`. A call inside a block that runs goes straight through: see `VerticalStep.on_call`.

    def __init__(self, parameter_map: ParameterMap, module_hooks: ModuleHooks, blocks: Sequence[str]) -> None:
        """``blocks``: FQNs of the modules that were made units of their own."""
        self._model = parameter_map.model
        self._module_hooks = module_hooks
        self.blocks: list[Block] = []
        """The modules, each before its descendants."""
        self._undo = ExitStack()
        """Restores the modules."""
        modules = dict(parameter_map.model.named_modules())
        for block in blocks:
            # The modules inside a block wait for the block's unit, too.
            unit_of_block = _unit_of_block(parameter_map, modules[block])
            if unit_of_block is None:
                continue
            for name, module in modules[block].named_modules(prefix=block):
                units = {parameter_map.locate(p)[0].index for p in module.parameters() if parameter_map.holds(p)}
                # Modules without weights of the block's unit (activations, dropout) need nothing fetched.
                if unit_of_block.index in units and not isinstance(module, torch.jit.ScriptModule):
                    self.blocks.append(Block(name, module, unit_of_block))
        self.unit_indices = {block.unit.index for block in self.blocks}

    @contextmanager
    def active(self, handler: Handler) -> Iterator[None]:
        """Inside the ``with`` block, ``handler`` is called in place of the modules' forwards. It gets the forward."""
        with self._undo:
            relieved: list[Any] = [module for module in self._model.modules() if _checkpoints_itself(module)]
            for module in relieved:
                self._undo.callback(setattr, module, "gradient_checkpointing", True)
                module.gradient_checkpointing = False
            for block in self.blocks:
                if id(block.module) in self._module_hooks.covered:
                    continue  # its forward was traced into a compiled one, which does not look the attribute up
                # An instance attribute, and not the class's: other models may have modules of the same class. Restored
                # as it was, since a script or accelerate may have set such an attribute before.
                attributes, forward = block.module.__dict__, block.module.forward
                if "forward" in attributes:
                    self._undo.callback(attributes.__setitem__, "forward", forward)
                else:
                    self._undo.callback(attributes.pop, "forward", None)
                # Without the engine's own activation checkpointing: blocks are recomputed anyway.
                computing = forward.forward if isinstance(forward, RecomputedForward) else forward
                attributes["forward"] = _wrap(handler, block, computing)
            yield

    def restore(self) -> None:
        """Restore the modules, however `active` was left. May be called again."""
        self._undo.close()


def _wrap(handler: Handler, block: Block, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(block, forward, args, kwargs)

    return call


def _unit_of_block(parameter_map: ParameterMap, block: nn.Module) -> Unit | None:
    """A unit all of whose parameters belong to this block; None if it has none."""
    # A block may have parameters in other units too: tied weights, tiles, experts.
    inside = {id(parameter) for parameter in block.parameters()}
    for parameter in filter(parameter_map.holds, block.parameters()):
        unit = parameter_map.locate(parameter)[0]
        if all(id(other) in inside for other in unit.parameters):
            return unit
    return None


def _checkpoints_itself(module: Any) -> bool:
    """Whether ``module`` is a transformers layer with non-reentrant activation checkpointing."""
    # That is switched off during a step, or the block would be recomputed twice. Reentrant checkpointing is left on: it
    # returns no gradients where no input requires one, so switching it off would change results.
    function = getattr(module, "_gradient_checkpointing_func", None)
    use_reentrant = getattr(function, "keywords", {}).get("use_reentrant")
    return getattr(module, "gradient_checkpointing", None) is True and use_reentrant is False
