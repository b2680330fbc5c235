"""Copies of weights and states that are made for the user to keep: what ``state_dict()`` gives.

Small ones are ordinary tensors. Large ones lie in nameless files beside the states, where there are any, and are looked at
through the page cache: a state dict of a model that does not fit into memory can be made and saved.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.threads.frames import callers
from swapper.volumes.mapped import MappedFile, mapped_file

logger = logging.getLogger(__name__)
_LEAST_BYTES = 1 << 20
"""Below, a file costs more than it saves."""
_STATE_DICT = nn.Module.state_dict.__code__


class UserCopies:
    """Makes copies, in files of some directories if they are large."""

    def __init__(self, directories: Iterable[Path] = ()) -> None:
        """``directories``: on the drives where states rest; none if they rest in memory."""
        self._directories = list(directories)
        self._collected = _Collected()
        self._watched: list[tuple[weakref.ref[torch.Tensor], int, str]] = []
        """Of a ``state_dict()``: its copies, torch's count of writes to each, and the parameters' names."""
        self._has_warned = False

    @contextmanager
    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Iterator[NewCopy]:
        """A copy that is filled inside the ``with`` block: dense, in any order of dimensions."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        directories = self._directories if num_bytes >= max(_LEAST_BYTES, 1) else []
        with mapped_file(directories, num_bytes) as file:
            yield NewCopy(shape, stride, dtype, file)

    def copy(self, view: torch.Tensor) -> torch.Tensor:
        """A copy of a dense tensor; of one on a GPU, there."""
        if view.device.type != "cpu":
            return view.clone()
        with self.new(view.shape, view.stride(), view.dtype) as made:
            made.write(0, view.as_strided((view.numel(),), (1,)))
            return made.finish()

    def collected(self, parameter: nn.Parameter, fqn: str, copy: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """What a running ``state_dict()`` gets for a parameter, the same memory under each of its names; None if none runs."""
        destination = _destination_of_state_dict()
        if destination is None:
            return None
        found = self._collected.get(destination, parameter, copy)
        if not self._has_warned:
            self._watched.append((weakref.ref(found), found._version, fqn))
        return found

    def warn_of_written(self) -> None:
        """In torch, what ``state_dict()`` gives is the weights themselves. Tell once if somebody has written to a copy."""
        if not self._watched:
            return
        self._watched = [entry for entry in self._watched if entry[0]() is not None]
        for reference, version, fqn in self._watched:
            copy = reference()
            if copy is not None and copy._version != version:
                self._has_warned = True
                self._watched = []
                logger.warning(
                    "what state_dict() gave for '%s' was written to. It is a copy, and the weight stays as it is: write to the "
                    "parameter (under torch.no_grad()), or give the state dict to load_state_dict",
                    fqn,
                )
                return

    def forget_written(self) -> None:
        """Weights are loaded: what was written to copies has become the weights, or is none of their business."""
        self._watched = []


class NewCopy:
    """A copy while it is being filled, in the order of memory."""

    def __init__(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, file: MappedFile | None
    ) -> None:
        self._shape, self._stride, self._dtype = tuple(shape), tuple(stride), dtype
        self._file = file
        self._whole = torch.empty(torch.Size(shape).numel(), dtype=dtype, device="cpu") if file is None else None

    def write(self, start: int, values: torch.Tensor) -> None:
        """Put elements (1-D, on the CPU, without gaps) at an offset."""
        if self._whole is not None:
            self._whole[start : start + values.numel()].copy_(values)
        elif self._file is not None:
            self._file.write(values.view(torch.uint8).numpy(), start * self._dtype.itemsize)

    @contextmanager
    def part(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """1-D memory for some elements, to be filled inside the ``with`` block."""
        if self._whole is not None:
            yield self._whole[start:stop]
        else:
            values = torch.empty(stop - start, dtype=self._dtype, device="cpu")
            yield values
            self.write(start, values)

    def finish(self) -> torch.Tensor:
        """The copy, whole."""
        if self._file is not None:
            self._whole = torch.from_numpy(self._file.array()).view(self._dtype)
        whole = self._whole if self._whole is not None else torch.empty(0, dtype=self._dtype, device="cpu")
        return whole.as_strided(self._shape, self._stride)


class _Collected(threading.local):
    """What the running ``state_dict()`` of this thread has got so far."""

    def __init__(self) -> None:
        self._destination: Callable[[], Any] = lambda: None
        self._copies: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def get(self, destination: Any, parameter: nn.Parameter, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._destination() is not destination:
            self._destination = weakref.ref(destination)
            self._copies = weakref.WeakValueDictionary()
        known = self._copies.get(id(parameter))
        if known is not None:
            return known.detach()
        made = copy()
        self._copies[id(parameter)] = made
        return made


def _destination_of_state_dict() -> Any:
    """The dict that the outermost running ``nn.Module.state_dict()`` of this thread fills; None if none runs.

    The stack is looked at, and nothing noted: so there is nothing to be undone after an exception in somebody's hook.
    """
    found = [frame for frame in callers() if frame.f_code is _STATE_DICT]
    return found[-1].f_locals.get("destination") if found else None
