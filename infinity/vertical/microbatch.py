"""One micro-batch of a vertical step: its thread, its calls of blocks, and its graph between them.

[Note: hand-off] Each micro-batch runs the user's forward in a thread of its own, because only a thread can be paused
inside somebody else's function. The training thread resumes one of them at a time, and waits until it pauses or ends.
So only one thread ever runs, and neither the model nor the engine needs a lock. These are coroutines, by threads.

    training thread     resume() ....waits.... resume() ....waits.... resume()
    micro-batch 0                 runs, pause()                                 runs, ...
    micro-batch 1                                        runs, pause()
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import threading
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
from infinity.threads.denormals import flush_denormals, flushes_denormals
from infinity.threads.openmp import end_openmp_workers
from infinity.vertical.call import Block, BlockCall, Tree
from infinity.vertical.inter_block_graph import InterBlockGraph
from infinity.vertical.restoring import ThreadState, thread_state_obstacle
from swapper.sync.limits import start_threads

# How often the waiting training thread returns to Python code, where a KeyboardInterrupt is raised.
_POLL_SECONDS = 1.0
# How long to wait for a thread to end. It may be inside a kernel that takes longer: then it is left to itself.
_TIMEOUT_SECONDS = 5.0


class Abandoned(BaseException):
    """Raised inside a micro-batch's thread to end it. No `Exception`, so that the model's ``except`` clauses let it
    pass."""


class MicroBatchThread:
    """Runs one function after another, each only between a `resume` and its next pause or its end.

    It is kept from step to step, because kernels keep buffers and compiled code per thread.
    """

    def __init__(self, index: int) -> None:
        # Two locks as signals, both locked at rest. `resume` unlocks `_go` and waits to lock `_stopped`; `pause`
        # unlocks `_stopped` and waits to lock `_go`. A plain Lock may be unlocked by another thread than the one that
        # locked it.
        self._go, self._stopped = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._stopped.acquire()
        self._job: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_running = False
        self._is_abandoned = False
        self.is_over = True
        """Whether the last function has ended."""
        # A daemon: the interpreter does not wait at exit for a thread that is paused.
        self._thread = threading.Thread(target=self._serve, name=f"infinity-micro-batch-{index}", daemon=True)

    # ---------------------------------------------------------------------------------------------- training thread

    def begin(self, function: Callable[[], object]) -> None:
        """Prepare ``function`` for the first `resume`, with the caller's context variables and thread settings.

        Raises:
            LimitError: the system gives no more threads.
        """
        if self._thread.ident is None:
            start_threads(self._thread)
        # Both are kept per thread, by OpenMP and by the processor's control register. With other values, results would
        # have other bits.
        context, num_threads, flushes = contextvars.copy_context(), torch.get_num_threads(), flushes_denormals()

        def job() -> None:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            flush_denormals(flushes)
            context.run(function)

        self._job = job
        self.is_over = False

    def resume(self) -> None:
        """Let the function run until it pauses or ends, see [Note: hand-off]. Raises the function's exception."""
        self._is_running = True
        self._go.release()
        while not self._stopped.acquire(timeout=_POLL_SECONDS):
            pass
        self._is_running = False
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: a cycle that would keep tensors alive

    def forbid(self) -> None:
        """Let the function end with `Abandoned` at its next pause, and the thread with it."""
        self._is_abandoned = True

    def end(self) -> None:
        """End the thread, also while its function is paused. Waits for nothing."""
        self._is_abandoned = True
        with contextlib.suppress(RuntimeError):  # raised for an unlocked lock: the thread has just been resumed
            self._go.release()

    def abandon(self) -> None:
        """End the thread, and wait for that at most ``_TIMEOUT_SECONDS``."""
        self._is_abandoned = True
        # An interrupt has reached the training thread inside `resume`, while the function runs. The exception is raised
        # in that thread at its next instruction in Python.
        if self._is_running and self._thread.ident is not None:
            identity = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Abandoned))
        self.end()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_SECONDS)

    # ------------------------------------------------------------------------------------------------ the other thread

    def pause(self) -> None:
        """Wait for the next `resume`, see [Note: hand-off].

        Raises:
            Abandoned: there will be none.
        """
        end_openmp_workers()  # while this thread waits, they would spin: see [Note: one pool] in infinity.threads.openmp
        if not self._is_abandoned:
            self._stopped.release()
            self._go.acquire()
        if self._is_abandoned:  # looked at twice: it may have been set before the pause, or during it
            raise Abandoned

    def _serve(self) -> None:
        with contextlib.suppress(Abandoned):  # `abandon` may raise it between any two lines here
            while not self._is_abandoned:
                self._go.acquire()
                job, self._job = self._job, None
                if job is None or self._is_abandoned:
                    return
                try:
                    job()
                except BaseException as error:
                    self._error = error
                del job  # the thread waits in `acquire` next, and would keep the model alive
                end_openmp_workers()
                self.is_over = True  # before the release: `resume` returns then, and its caller reads this
                with contextlib.suppress(RuntimeError):  # already unlocked, if the thread was abandoned
                    self._stopped.release()


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
                task, self._task = self._task, None
                # An exception of the block is raised again in the micro-batch's thread, where the model may catch it.
                # KeyboardInterrupt and SystemExit are not caught: they belong to the training thread, which this one is.
                try:
                    self._computed = task()
                except (Exception, Abandoned) as error:
                    self._computed = error
                del task  # it refers to the graph of the call, which ends when the thread goes on
                self._thread.resume()
        except Abandoned:
            if self._unsupported is None:
                raise
        if self._unsupported is not None:
            raise self._unsupported

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
                result, outputs, edges = call.run(args, kwargs, self._compute)
                self.graph.on_block_call(edges)
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
        if thread_state_obstacle() is not None:
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
