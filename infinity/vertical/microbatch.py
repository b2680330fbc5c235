"""One micro-batch on its way through the model: a lane, its calls of units, and its graph between them.

Knows what happens inside the lane; must not know the other micro-batches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from infinity.activations.boundary import Boundary
from infinity.activations.refusal import Refusal
from infinity.device.compute import ComputeDevice
from infinity.threads.engine_lock import EngineLock
from infinity.vertical.baton import Abandoned, Errand, Lane
from infinity.vertical.call import Site, UnitCall
from infinity.vertical.glue import Glue
from infinity.vertical.replay.ambient import Ambient, obstacle
from infinity.vertical.replay.buffer_watch import BufferWatch
from infinity.vertical.replay.tree import tensors_in

T = TypeVar("T")

_present = threading.local()


def present() -> MicroBatch | None:
    """The micro-batch whose lane the calling thread is; None in any other thread."""
    found: MicroBatch | None = getattr(_present, "micro_batch", None)
    return found


@dataclass(frozen=True)
class Arrived:
    """A message: the next call of a unit is due."""

    site: Site
    with_gradient: bool


class Computed:
    """A message: the call has been computed."""


@dataclass(frozen=True)
class Tools:
    """What all micro-batches of a step share."""

    boundary: Boundary
    device: ComputeDevice
    anchor: torch.Tensor
    is_trial: bool
    watch: BufferWatch | None
    """Takes note of where the model's buffers are used."""
    hooks: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
    """The pager's ``pack`` and ``unpack``."""
    lock: EngineLock
    """Held by the training thread, for which the lanes work."""


class MicroBatch:
    """Runs one forward, and stops before and after each call of a unit."""

    def __init__(self, index: int, lane: Lane, compute_loss: Callable[[], torch.Tensor], tools: Tools) -> None:
        """``index`` is its number in the step; ``compute_loss`` runs the user's forward."""
        self.index = index
        self._lane = lane
        self._tools = tools
        self.calls: list[UnitCall | None] = []
        """By position from 0; None for a call without gradient."""
        self.glue = Glue(self)
        self.is_inside = False
        """Whether a unit is being computed."""
        self.is_forward_over = False
        self.refusal: Refusal | None = None
        ambient = Ambient(tools.device)
        lane.begin(lambda: self._run(compute_loss, ambient))

    def resume(self) -> Any:
        """Let it run on. See `Lane.resume`.

        Raises:
            Refusal: it cannot go on like this.
        """
        message = self._lane.resume()
        while isinstance(message, Errand):
            message.run()
            message = self._lane.resume()
        if self.refusal is not None:
            raise self.refusal
        return message

    def end_forward(self) -> None:
        """It has its loss."""
        self.is_forward_over = True

    # ------------------------------------------------------------------------------------------------ inside the lane

    def _run(self, compute_loss: Callable[[], torch.Tensor], ambient: Ambient) -> torch.Tensor:
        _present.micro_batch = self
        watch = self._tools.watch
        try:
            with (
                self._tools.lock.joined(),
                ambient.entered(),
                contextlib.nullcontext() if watch is None else watch.watching(self._place, self._note_hook),
                torch.enable_grad(),
                torch.autograd.graph.saved_tensors_hooks(*self._tools.hooks),
            ):
                loss = compute_loss()
                self.glue.find_hooks()
                self._note_place()
                return loss
        finally:
            _present.micro_batch = None

    def _note_hook(self, tensor: torch.Tensor) -> None:
        if not self.is_inside:
            self.glue.note_hook(tensor)

    def _place(self) -> int:
        """Even between two calls, odd inside one."""
        return 2 * len(self.calls) - self.is_inside

    def _note_place(self) -> None:
        if self._tools.watch is not None:
            self._tools.watch.note(self._place())

    def call(self, site: Site, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called by the user's code."""
        with_gradient = torch.is_grad_enabled()
        self.glue.watch(leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
        self.glue.find_hooks()
        self._note_place()
        self._lane.park(Arrived(site, with_gradient))
        self.is_inside = True
        try:
            if with_gradient:
                tools = self._tools
                call = UnitCall(site, forward, self, tools.boundary, tools.device, is_trial=tools.is_trial)
                self.calls.append(call)
                result = call.run(args, kwargs, tools.anchor)
                self.glue.note_call(call.take_edges())
                self.glue.watch(tensors_in(result))
            else:
                self.calls.append(None)
                self.glue.note_call(None)
                result = forward(*args, **kwargs)
            self._note_place()
        except Refusal as refusal:
            self.refuse(refusal)
        finally:
            self.is_inside = False
        self._lane.park(Computed())
        return result

    def compute(self, function: Callable[[], T]) -> T:
        """Call ``function``, on the training thread if this one's state can be carried over."""
        if obstacle() is not None:
            return function()
        ambient = Ambient(self._tools.device)
        errand = Errand(lambda: ambient.run(function))
        self._lane.park(errand)
        result: T = errand.take_result()
        return result

    def refuse(self, refusal: Refusal) -> NoReturn:
        """This cannot go on vertically. The user's code must not catch that."""
        self.refusal = refusal
        raise Abandoned from refusal

    def clear(self) -> None:
        """Let go of everything."""
        for call in self.calls:
            if call is not None and not call.is_over:
                call.drop()
        self.calls.clear()
        self.glue.clear()
