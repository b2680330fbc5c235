"""Autograd's hooks for saved tensors, put up and taken down so that an interrupt at any point leaves none behind.

Knows torch's stack of hooks and what stands for a weight in a graph; must not know when a unit is in memory.

[Note: interrupted hooks] A KeyboardInterrupt may come between any two steps: between pushing the hooks and noting that
they are pushed, between popping them and noting that, or in the midst of leaving a ``with`` block. So nothing is noted:
torch's own stack tells whether ours are on it, and what an interrupt left there is taken down when the next forward
begins, or the one that was cut off is abandoned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from infinity.torch_internals.names import saving_hooks
from infinity.units.layout import Slot
from infinity.units.unit import Unit


class SavedView:
    """Stands for a view of a unit's weights in autograd's graph."""

    __slots__ = ("__weakref__", "count", "dtype", "offset", "shape", "stride", "unit", "version")

    def __init__(self, unit: Unit, tensor: torch.Tensor, slot: Slot | None = None) -> None:
        """``tensor``: the view; or, with its ``slot``, a whole parameter that is paged out."""
        self.unit = unit
        self.version = unit.version
        self.count = tensor._version if tensor.requires_grad else None
        """Of writes to the parameter, which torch would look at."""
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride() if slot is None else slot.spec.stride
        self.offset = tensor.storage_offset() if slot is None else slot.offset_bytes // tensor.dtype.itemsize
        unit.note_token(self)

    def check(self) -> None:
        """Raise if the weights are not those any more that forward used."""
        unit = self.unit
        if unit.version != self.version:
            raise RuntimeError(
                f"backward needs the weights of unit {unit.name} as they were in forward, but they have been changed by "
                "an optimizer step since. Run forward again"
            )
        if unit.has_been_written and self.count is not None:
            slot = unit.slot_at(int(self.offset) * self.dtype.itemsize)
            if slot is not None and unit.parameters[slot.index]._version != self.count:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"parameter '{slot.spec.fqn}', of shape {list(slot.spec.shape)}, after forward had used it"
                )

    def view(self) -> torch.Tensor:
        """The view itself, of a unit that is in memory."""
        if self.unit.flat is None:
            raise RuntimeError(f"unit {self.unit.name} is not resident after a touch")
        return self.unit.flat.tensor().view(self.dtype).as_strided(self.shape, self.stride, self.offset)


def as_saved(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """``tensor``, unless it has been changed since it had this version."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {list(tensor.shape)} is at version {tensor._version}, expected version {version}"
        )
    return tensor


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost pack and unpack hooks of the calling thread; None without any."""
    top: tuple[Any, Any] | None = saving_hooks._top_saved_tensors_default_hooks(True)
    return top


class SavingHooks:
    """One owner's pack and unpack hooks. As a context manager they are up inside the ``with`` block."""

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        """``pack`` and ``unpack``: as for ``torch.autograd.graph.saved_tensors_hooks``."""
        self._pack = pack
        self._unpack = unpack

    def push(self) -> None:
        """Put them up in the calling thread. Where torch.func forbids hooks, what is saved keeps the flat buffers alive."""
        if saving_hooks._saved_tensors_hooks_get_disabled_error_message() is not None:
            return
        saving_hooks._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def push_in_recomputation(self) -> None:
        """Put them up for a recomputation inside backward.

        Without any, autograd keeps a leaf itself, and what it computes with then is whatever the parameter is bound to by
        that time. Reentrant checkpointing has none: ours serve. Non-reentrant checkpointing has its own, which collect
        what is saved and must stay; they keep a frozen parameter itself, so they get a view of it instead.
        """
        top = top_hooks()
        if top is None or top[0] == self._pack:
            self.push()
        else:
            collect, give = top
            saving_hooks._push_saved_tensors_default_hooks(functools.partial(self._pack_for, collect), give)

    @contextmanager
    def in_recomputation(self) -> Iterator[None]:
        """They are up inside the ``with`` block, which is part of a recomputation inside backward."""
        self.push_in_recomputation()
        try:
            yield
        finally:
            self.pop()

    def _pack_for(self, collect: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return collect(tensor.detach() if is_frozen else tensor)

    def _are(self, hooks: tuple[Any, Any]) -> bool:
        pack = hooks[0]
        return bool(pack == self._pack or (isinstance(pack, functools.partial) and pack.func == self._pack_for))

    @property
    def are_up(self) -> bool:
        """Whether they are the innermost of the calling thread."""
        top = top_hooks()
        return top is not None and self._are(top)

    def pop(self) -> None:
        """Take the innermost of them down, if any are up. Those of others stay, wherever they are."""
        self._take_down(most=1)

    def clear(self) -> None:
        """Take all of them down, as after an interrupt."""
        self._take_down(most=None)

    def clear_top(self) -> None:
        """Take down those that nobody else's are above."""
        while (top := top_hooks()) is not None and self._are(top):
            saving_hooks._pop_saved_tensors_default_hooks()

    def _take_down(self, most: int | None) -> None:
        others: list[tuple[Any, Any]] = []
        num_found = 0
        try:
            while num_found != most and (top := top_hooks()) is not None:
                saving_hooks._pop_saved_tensors_default_hooks()
                if self._are(top):
                    num_found += 1
                else:
                    others.append(top)
        finally:
            for hooks in reversed(others):
                saving_hooks._push_saved_tensors_default_hooks(*hooks)

    def __enter__(self) -> None:
        self.push()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pop()
