"""Copies of weights and states for the user, such as the values of ``state_dict()``.

Small ones are ordinary tensors. Large ones are memory-mapped nameless files on the drives of the states, if there are
any. So a state dict of a model that does not fit into memory can be made and saved.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.threads.frames import callers
from infinity.torch_internals.names import outside_modes
from swapper.volumes.mapped_memory import MappedFile, mapped_file

logger = logging.getLogger(__name__)
# Smaller copies are ordinary tensors: a mapping costs system calls and at least one page of the kernel's cache.
_LEAST_BYTES = 1 << 20
# What `put_aside` copies at a time: from a GPU, it takes as much host memory.
_PART_BYTES = 16 << 20
_STATE_DICT = nn.Module.state_dict.__code__

PutAside = Callable[[torch.Tensor], torch.Tensor | None]
"""As `UserCopies.put_aside`."""


class UserCopies:
    """Makes copies, and puts large ones into files."""

    def __init__(self, directories: Iterable[Path] = ()) -> None:
        """``directories``: on the drives with the states; none if states are in memory."""
        self._directories = list(directories)
        self._destination: Callable[[], Any] = lambda: None
        self._collected: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        """The dict that ``state_dict()`` fills, and by ``id`` of a parameter its copy there. Under the engine lock."""
        self._watched: list[tuple[weakref.ref[torch.Tensor], int, str]] = []
        """Copies that ``state_dict()`` returned, their version then, and their parameters' FQNs."""
        self._has_warned_of_writes = False

    @contextmanager
    def new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Iterator[NewCopy]:
        """A copy that the ``with`` block fills. ``stride`` must be dense, in any order of dimensions."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        directories = self._directories if num_bytes >= max(_LEAST_BYTES, 1) else []
        with mapped_file(directories, num_bytes) as file:
            yield NewCopy(shape, stride, dtype, file)

    def copy(self, view: torch.Tensor) -> torch.Tensor:
        """Copy a dense tensor. The copy of a GPU tensor is on the GPU."""
        if view.device.type != "cpu":
            return view.clone()
        with self.new(view.shape, view.stride(), view.dtype) as made:
            made.write(0, view.as_strided((view.numel(),), (1,)))
            return made.finish()

    def put_aside(self, memory: torch.Tensor) -> torch.Tensor | None:
        """A copy (uint8, 1-D) that frees the original's memory: in a file if there is a drive, else of a GPU's on the host.

        None: the copy would take as much of the same memory.
        """
        num_bytes = memory.numel()
        with mapped_file(self._directories if num_bytes >= _LEAST_BYTES else [], num_bytes) as file:
            if file is None and memory.device.type == "cpu":
                return None
            made = NewCopy(memory.shape, memory.stride(), memory.dtype, file)
            for start in range(0, num_bytes, _PART_BYTES):
                made.write(start, memory[start : start + _PART_BYTES].cpu())
            return made.finish()

    @outside_modes
    def collected(self, parameter: nn.Parameter, fqn: str, copy: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """The value of a parameter for the running ``state_dict()``; None if none runs."""
        # The dict that the outermost running call of this thread fills. Read from the stack: a flag set by a hook would
        # stay set if another hook raised.
        running = [frame for frame in callers() if frame.f_code is _STATE_DICT]
        destination = running[-1].f_locals.get("destination") if running else None
        if destination is None:
            return None
        # Another dict, so another call of state_dict(). Weak, so that nothing is kept alive after it.
        if self._destination() is not destination:
            self._destination = weakref.ref(destination)
            self._collected.clear()
        # Tied weights get the same memory under each name, as in torch, so that torch.save and safetensors store it
        # once.
        found = self._collected.get(id(parameter))
        if found is None:
            self._collected[id(parameter)] = found = copy()
        else:
            found = found.detach()  # another tensor over the same memory
        if not self._has_warned_of_writes:
            self._watched.append((weakref.ref(found), found._version, fqn))
        return found

    def warn_of_written(self) -> None:
        """Warn once if a script has written to a value of ``state_dict()``: in torch that would change the weight."""
        if not self._watched:
            return
        self._watched = [entry for entry in self._watched if entry[0]() is not None]
        for reference, version, fqn in self._watched:
            copy = reference()
            if copy is not None and copy._version != version:
                self._has_warned_of_writes = True
                self._watched = []
                logger.warning(
                    "the tensor that state_dict() returned for '%s' was written to. It is a copy, so the weight does "
                    "not change: write to the parameter (under torch.no_grad()), or pass the state dict to "
                    "load_state_dict",
                    fqn,
                )
                return

    def forget_written(self) -> None:
        """Stop watching: a script has loaded weights, so its writes to copies were meant for that."""
        self._watched = []


class NewCopy:
    """A copy that is being filled. Offsets count elements in memory order."""

    def __init__(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, file: MappedFile | None
    ) -> None:
        self._shape, self._stride, self._dtype = tuple(shape), tuple(stride), dtype
        self._file = file
        self._whole = torch.empty(torch.Size(shape).numel() if file is None else 0, dtype=dtype, device="cpu")

    def write(self, start: int, values: torch.Tensor) -> None:
        """Write elements (1-D, contiguous, on the CPU) at an offset."""
        if self._file is None:
            self._whole[start : start + values.numel()].copy_(values)
        else:
            self._file.write(values.view(torch.uint8).numpy(), start * self._dtype.itemsize)

    def finish(self) -> torch.Tensor:
        """Return the copy as a tensor."""
        # A private mapping: a script's writes stay in memory, and the nameless file disappears with the tensor.
        whole = self._whole if self._file is None else torch.from_numpy(self._file.array()).view(self._dtype)
        return whole.as_strided(self._shape, self._stride)
