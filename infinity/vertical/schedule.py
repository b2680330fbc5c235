"""Runs steps in the vertical order as long as the model allows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from infinity.activations.recomputation import RecomputedForward
from infinity.activations.unsupported import NeverSupportedSchedule, UnsupportedSchedule
from infinity.errors import EngineClosedError
from infinity.gradients.collector import have_hooks_of_others
from infinity.loop.module_hooks import ModuleHooks
from infinity.paging.compiled_forwards import put
from infinity.paging.parameter_map import ParameterMap
from infinity.paging.saved_tensors import is_saved_otherwise
from infinity.plan.cost_model import Traffic
from infinity.units.unit import Unit
from infinity.vertical.call import Block
from infinity.vertical.microbatch import Abandoned, MicroBatchThread
from infinity.vertical.restoring import StepStart, thread_state_obstacle
from infinity.vertical.step import Key, StepContext, StepOptions, VerticalStep
from swapper import SwapperError
from swapper.sync.interrupts import uninterrupted

# `Spilling` keeps two tensors in memory, whatever its capacity: one is written out while the next one is made. A
# gradient that does not fit twice would go beyond the budget.
_NUM_IN_MEMORY = 2


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
    def active(self, handler: Callable[..., Any]) -> Iterator[None]:
        """Inside the ``with`` block, ``handler`` is called in place of the modules' forwards.

        It gets the `Block`, its forward, and the arguments.
        """
        with self._undo:
            for module in self._model.modules():
                if _checkpoints_itself(module):
                    put(self._undo, module, "gradient_checkpointing", False)
            for block in self.blocks:
                if id(block.module) in self._module_hooks.covered:
                    continue  # its forward was traced into a compiled one, which does not look the attribute up
                # Without the engine's own activation checkpointing: blocks are recomputed anyway.
                forward = block.module.forward
                computing = forward.forward if isinstance(forward, RecomputedForward) else forward
                # An instance attribute, and not the class's: other models may have modules of the same class. A script or
                # accelerate may have set such an attribute before.
                put(self._undo, block.module, "forward", _in_place_of(computing, handler, block))
            yield

    def restore(self) -> None:
        """Restore the modules, however `active` was left. May be called again."""
        self._undo.close()


def _in_place_of(forward: Callable[..., Any], handler: Callable[..., Any], block: Block) -> Callable[..., Any]:
    # A function: a copy of the module has the same one, where a partial would be copied too, with all of the step.
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return handler(block, forward, *args, **kwargs)

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


class VerticalSchedule:
    """The vertical schedule of one engine."""

    def __init__(self, context: StepContext) -> None:
        self._on = context
        self._selector = context.selector
        self._map = context.coordinator.parameter_map
        self._interception = Interception(self._map, context.module_hooks, context.blocks)
        self._start: StepStart | None = None
        self._step: VerticalStep | None = None
        """The step under way."""
        self._threads: list[MicroBatchThread] = []
        """One per micro-batch, kept from step to step."""
        # Ends the threads of an engine that is garbage-collected without close(). At exit the threads are daemons.
        weakref.finalize(self, _end_all, self._threads).atexit = False
        self._tied: list[Key] = []
        self.traffic = Traffic(is_vertical=self._selector.is_expected)
        """The order of the last step (at first, of the expected one), from which the plan predicts bytes."""

    def obstacle(self) -> str | None:
        """Why the next step cannot go vertically; None if it can be tried. The first reason that applies."""
        return (
            self._selector.reason_against
            or (None if self._interception.blocks else "the model has no repeated blocks")
            or (
                "gradients of earlier micro-batches wait for their step" if self._on.stepper.gradients.has_any else None
            )
            or (
                "a parameter has a hook for its accumulated gradient, which would see each micro-batch's"
                if have_hooks_of_others(parameter for unit in self._map.units for parameter in unit.parameters)
                else None
            )
            or (
                "hooks for saved tensors are active, and would not see what is recomputed"
                if is_saved_otherwise()
                else None
            )
            or thread_state_obstacle()
        )

    def run(
        self, compute_losses: Sequence[Callable[[], torch.Tensor]], options: StepOptions
    ) -> list[torch.Tensor] | str:
        """Run forward and backward of all micro-batches.

        Args:
            compute_losses: one function per micro-batch, which runs the model and returns the loss.
            options: of the step.

        Returns:
            The losses, detached. Or the reason why the step must go in the ordinary order. Then the model and the
            random generators are restored.
        """
        with self._on.coordinator.lock.held("engine.train_batch()"):
            return self._run(compute_losses, options)

    def _find_tied(self) -> list[Key]:
        """Trainable parameters outside of blocks that exactly two modules share, such as a tied embedding."""
        # Their gradients are joined micro-batch by micro-batch: see [Note: parts] in `infinity.vertical.step`. One part
        # per micro-batch waits as an activation checkpoint, so two of them have to fit into host memory.
        capacity_bytes, owners = self._on.activation_bytes, self._map.num_owners()
        if capacity_bytes is None or not self._on.device.uses_host_memory:
            return []
        return [
            (unit.index, slot.index)
            for unit in self._map.units
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True)
            if slot.spec.is_trainable
            and unit.index not in self._interception.unit_indices
            and _NUM_IN_MEMORY * parameter.numel() * parameter.itemsize <= capacity_bytes
            and owners.get((unit.index, slot.index)) == 2
        ]

    def _run(
        self, compute_losses: Sequence[Callable[[], torch.Tensor]], options: StepOptions
    ) -> list[torch.Tensor] | str:
        on = self._on
        on.module_hooks.follow_compilation()
        # Before anything of the step: from here it can be repeated.
        self._start = StepStart(self._map.model, self._start)
        is_trial = not self._selector.is_proven
        # Looked for again in each trial: the model may have been changed since.
        if options.keeps_bits and is_trial:
            self._tied = self._find_tied()
        tied = self._tied if options.keeps_bits else []
        step = VerticalStep(on, self._interception.unit_indices, options, tied, is_trial=is_trial)
        resumed_bytes = on.stepper.gradients.resumed_bytes
        self._step = step
        try:
            with self._interception.active(step.on_call):
                losses = step.run(compute_losses, self._threads_for(len(compute_losses)), self._start)
        except Exception as error:
            self._cut_off(step, error)
            # In a trial nothing has been updated, so the ordinary order is tried after any error. If the model is to
            # blame, it raises there as well, with the user's usual traceback. Errors of drives and of a closed engine
            # are final.
            is_foreign = step.is_trial and not isinstance(error, SwapperError | EngineClosedError)
            if not is_foreign and not isinstance(error, UnsupportedSchedule):
                raise
            self._start.restore()
            reason = (
                str(error)
                if isinstance(error, UnsupportedSchedule)
                else f"it failed with {type(error).__name__}: {error}"
            )
            self._selector.on_failure(reason, is_final=isinstance(error, NeverSupportedSchedule))
            self.traffic = Traffic()
            return reason
        except BaseException as error:
            self._cut_off(step, error)
            if isinstance(error, Abandoned):  # the model's own code has closed the engine: see `close`
                raise EngineClosedError.after_close("a step under way") from error
            raise
        finally:
            self._step = None
        self._selector.on_success()
        # In a trial all gradients wait for the end of the step. Later steps spill less, so the trial predicts nothing.
        resumed_bytes = 0 if is_trial else on.stepper.gradients.resumed_bytes - resumed_bytes
        self.traffic = Traffic(
            is_vertical=True, spilled_bytes=step.checkpoints.spilled_bytes, resumed_bytes=resumed_bytes
        )
        # After the `try`: an error of the collective is no reason to repeat the step.
        on.stepper.gradients.average_last(options.step)
        return losses

    def _cut_off(self, step: VerticalStep, error: BaseException) -> None:
        # Threads first: none may run the model while its forwards and gradients are restored.
        with uninterrupted():
            self._end_threads()
            self._interception.restore()
            step.undo(error)

    def _threads_for(self, number: int) -> list[MicroBatchThread]:
        self._threads += [MicroBatchThread(index) for index in range(len(self._threads), number)]
        return self._threads[:number]

    def _end_threads(self) -> None:
        for thread in self._threads:
            thread.abandon()
        self._threads.clear()

    def on_ordinary_step(self, reason: str | None = None) -> None:
        """Record that a step, or a part of it, goes in the ordinary order; ``reason`` is logged once."""
        self.traffic = Traffic()
        if reason is not None and self._selector.reason_against is None:
            self._selector.say(reason)

    def forgive(self) -> None:
        """Do not count the last failed step: see `ScheduleSelector.forgive`."""
        self._selector.forgive()

    def close(self) -> None:
        """End the threads, and a step that is under way."""
        self._interception.restore()
        if self._step is None:
            self._end_threads()
        else:  # called by the model's own code, on a micro-batch's thread: that cannot wait for its own end
            for thread in self._threads:
                thread.forbid()


def _end_all(threads: list[MicroBatchThread]) -> None:
    """End the threads of an owner that is garbage. Takes no lock: see [Note: reaping] in
    ``infinity.engine.shutdown``."""
    for thread in threads:
        thread.end()
