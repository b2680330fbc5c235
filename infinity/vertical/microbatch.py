"""One micro-batch of a vertical step: its thread, its calls of blocks, and its graph between them."""

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


class BlockArrival(NamedTuple):
    """The call of a block that a micro-batch has arrived at."""

    block: Block
    with_gradient: bool


@dataclass(eq=False)
class MicroBatch:
    """Runs one forward, and pauses before and after each call of a block."""

    # resume() number   the thread runs                           it pauses with
    #        1          embedding, up to the call of block 0      arrival = block 0
    #        2          block 0                                   arrival = None
    #        3          what follows, up to the call of block 1   arrival = block 1
    #        ...
    #       last        norm, head and loss                       is_over
    # Before number 2 all micro-batches have had number 1, and the weights of block 0 are fetched once for all of them.

    index: int
    """Its number in the step."""
    compute_loss: InitVar[Callable[[], torch.Tensor]]
    """Runs the user's forward."""
    _thread: MicroBatchThread
    """A thread on which no function is under way."""
    _checkpoints: ActivationCheckpoints
    """Keeps inputs of blocks."""
    _coordinator: ParameterCoordinator
    _device: ComputeDevice
    is_trial: bool
    """Check everything that might make a repetition differ."""
    calls: list[BlockCall | None] = field(default_factory=list)
    """By position from 0; None for a call without gradient."""
    arrival: BlockArrival | None = None
    """The call that the next `resume` computes; None after it, and at the end of forward."""
    _loss: Any = None
    is_inside = False
    """Whether a block is being computed."""
    _task: Callable[[], Tree] | None = None
    """A computation for the training thread, which runs it before it resumes this thread."""
    _computed: Tree | BaseException | None = None
    """The result of that task, or the exception that it raised."""
    _unsupported: UnsupportedSchedule | None = None

    def __post_init__(self, compute_loss: Callable[[], torch.Tensor]) -> None:
        self.graph = InterBlockGraph(self.index)
        self._thread.begin(functools.partial(self._run, compute_loss, ThreadState(self._device)))

    # ------------------------------------------------------------------------------------------------ training thread

    def resume(self) -> None:
        """Run until the micro-batch arrives at a block, or has computed one, or has its loss.

        Raises:
            UnsupportedSchedule: the step cannot go on in the vertical order.
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
        """Compute a block for the micro-batch's thread. An exception is raised again there, where the model may catch
        it."""
        # KeyboardInterrupt and SystemExit are not caught: they belong to the training thread, which this one is.
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
        """Let gradients come, after the end of forward. Returns what the user's function returned."""
        loss, self._loss = self._loss, None
        for call in self.calls:
            if call is not None:
                call.end_forward()
        return loss

    def clear(self) -> None:
        """Release everything."""
        for call in self.calls:
            if call is not None and not call.is_over:
                call.drop()
        self.calls.clear()
        self.graph.clear()

    # ----------------------------------------------------------------------------------------- the micro-batch's thread

    def _run(self, compute_loss: Callable[[], torch.Tensor], state: ThreadState) -> None:
        present.micro_batch = self  # thread-local: how hooks of modules and parameters find out for whom they run
        coordinator = self._coordinator
        try:
            # The engine's own view of this thread first: `joined` lets it work for the call that holds the lock. The
            # saved tensor hooks pack views of weights, as in an ordinary forward.
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
        """Compute a call of a block by the user's code. Runs on the micro-batch's thread."""
        with_gradient = torch.is_grad_enabled()
        # Gradients of a block's inputs come in a backward of their own, so hooks on them are looked for before the
        # tensors die.
        self.graph.watch(leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
        self.graph.find_hooks()
        self.arrival = BlockArrival(block, with_gradient)
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
                self.calls.append(None)  # keeps positions equal to those of other micro-batches
                self.graph.on_block_call(None)
                result = forward(*args, **kwargs)
        except UnsupportedSchedule as unsupported:
            # Not raised as it is: a model with `except Exception` would go on. `resume` raises it on the training
            # thread.
            self._unsupported = unsupported
            raise Abandoned from unsupported
        finally:
            self.is_inside = False
        self._thread.pause()
        return result

    def _compute(self, function: Callable[[], Tree]) -> Tree:
        """Call ``function``, on the training thread if the state of this one can be carried over."""
        # The training thread keeps its OpenMP workers, while this one has to release them at each pause: see
        # [Note: one pool] in `infinity.threads.openmp`.
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
            del computed  # an exception's traceback refers to this frame


class _HookWatch(TorchFunctionMode):
    """Sees calls of ``register_hook`` between blocks, also on tensors that are no arguments of a block."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        super().__init__()
        self._micro_batch = micro_batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.register_hook and not self._micro_batch.is_inside:
            self._micro_batch.graph.on_hook(args[0])
        return func(*args, **kwargs or {})
