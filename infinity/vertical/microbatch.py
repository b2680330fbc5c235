"""One micro-batch on its way through the model: its thread, its calls of blocks, and its graph between them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from infinity.activations.activation_checkpoints import ActivationCheckpoints
from infinity.activations.unsupported import UnsupportedSchedule
from infinity.device.compute import ComputeDevice
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.loop.vertical_forward import present
from infinity.vertical.arguments import Tree
from infinity.vertical.call import Block, BlockCall
from infinity.vertical.handoff import Abandoned, MicroBatchThread
from infinity.vertical.inter_block_graph import InterBlockGraph
from infinity.vertical.thread_state import ThreadState, obstacle


class Arrival(NamedTuple):
    """The next call of a block is due."""

    block: Block
    with_gradient: bool


@dataclass(eq=False)
class MicroBatch:
    """Runs one forward, and stops before and after each call of a block."""

    index: int
    """Its number in the step."""
    compute_loss: InitVar[Callable[[], torch.Tensor]]
    """Runs the user's forward."""
    _thread: MicroBatchThread
    """Runs that; nothing else is under way there."""
    _checkpoints: ActivationCheckpoints
    """Keeps inputs of blocks."""
    _coordinator: ParameterCoordinator
    """The call that holds its lock is what the thread works for."""
    _device: ComputeDevice
    """The compute device."""
    is_trial: bool
    """Look closely at everything."""
    calls: list[BlockCall | None] = field(default_factory=list)
    """By position from 0; None for a call without gradient."""
    arrival: Arrival | None = None
    """The call that waits for the next `resume`; None where it has just been computed, and at the end of forward."""
    _loss: Any = None
    is_inside = False
    """Whether a block is being computed."""
    _task: Callable[[], Tree] | None = None
    """What the training thread computes before it goes on with this one."""
    _computed: Tree | BaseException | None = None
    _unsupported: UnsupportedSchedule | None = None

    def __post_init__(self, compute_loss: Callable[[], torch.Tensor]) -> None:
        self.graph = InterBlockGraph(self.index)
        self._thread.begin(functools.partial(self._run, compute_loss, ThreadState(self._device)))

    # ------------------------------------------------------------------------------------------------ training thread

    def resume(self) -> None:
        """Let it run on until it arrives at a block, or has computed one, or has its loss.

        Raises:
            Refusal: it cannot go on like this.
        """
        try:
            self._thread.resume()
            while self._task is not None:
                self._run_task()
                self._thread.resume()
        except Abandoned:
            if self._unsupported is None:
                raise
        if self._unsupported is not None:
            raise self._unsupported

    def _run_task(self) -> None:
        """Compute a block for the micro-batch's thread. What is raised is that one's, unless it is to end the program."""
        task, self._task = self._task, None
        if task is not None:
            try:
                self._computed = task()
            except (Exception, Abandoned) as error:
                self._computed = error

    @property
    def is_over(self) -> bool:
        """Whether its forward has ended."""
        return self._thread.is_over

    def end_forward(self) -> Any:
        """Its forward has ended, gradients may come. Gives the loss, whatever that is."""
        loss, self._loss = self._loss, None
        for call in self.calls:
            if call is not None:
                call.end_forward()
        return loss

    def forbid(self) -> None:
        """It does not go on behind the next block: the engine is closed."""
        self._thread.forbid()

    def clear(self) -> None:
        """Release everything."""
        for call in self.calls:
            if call is not None and not call.is_over:
                call.drop()
        self.calls.clear()
        self.graph.clear()

    # ----------------------------------------------------------------------------------------- the micro-batch's thread

    def _run(self, compute_loss: Callable[[], torch.Tensor], state: ThreadState) -> None:
        present.micro_batch = self
        coordinator = self._coordinator
        try:
            with (
                coordinator.lock.joined(),
                state.entered(),
                _HookWatch(self) if self.is_trial else contextlib.nullcontext(),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(coordinator.pack, coordinator.unpack),
            ):
                self._loss = compute_loss()
                self.graph.find_hooks()
        finally:
            present.micro_batch = None

    def call(self, block: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block is called by the user's code."""
        with_gradient = torch.is_grad_enabled()
        self.graph.watch(leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
        self.graph.find_hooks()
        self.arrival = Arrival(block, with_gradient)
        self._thread.pause()
        self.arrival = None
        self.is_inside = True
        try:
            if with_gradient:
                call = BlockCall(block, forward, self.index, self._checkpoints, self._device, is_trial=self.is_trial)
                self.calls.append(call)
                result, outputs = call.run(args, kwargs, self._compute)
                self.graph.on_block_call(call.pop_edges())
                self.graph.watch(outputs)
            else:
                self.calls.append(None)
                self.graph.on_block_call(None)
                result = forward(*args, **kwargs)
        except UnsupportedSchedule as unsupported:
            self._unsupported = unsupported  # the model may catch it
            raise Abandoned from unsupported
        finally:
            self.is_inside = False
        self._thread.pause()
        return result

    def _compute(self, function: Callable[[], Tree]) -> Tree:
        """Call ``function``, on the training thread if this one's state can be carried over: that one keeps its workers."""
        if obstacle() is not None:
            return function()
        self._task = functools.partial(ThreadState(self._device).run, function)
        self._thread.pause()
        computed, self._computed = self._computed, None
        if isinstance(computed, Tree):
            return computed
        try:
            raise computed or RuntimeError("a block has not been computed")
        finally:
            del computed  # it refers to this frame


class _HookWatch(TorchFunctionMode):
    """Notices tensors that are given hooks for their gradients between blocks: they have to see whole gradients."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        super().__init__()
        self._micro_batch = micro_batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and not self._micro_batch.is_inside:
            self._micro_batch.graph.on_hook(args[0])
        return func(*args, **kwargs or {})
