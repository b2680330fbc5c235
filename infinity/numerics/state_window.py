"""Stored optimizer states, opened for an update part by part.

Knows the format of states; must not know what an optimizer does with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from infinity.numerics.state_codec import Noise, decode, encode
from infinity.numerics.state_format import StateFormat

_HOST_NUMEL = 1 << 18
"""Elements that are decoded at a time on the CPU: few enough to stay in the processor's cache, and enough to forget the calls."""
_DEVICE_NUMEL = 1 << 22


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.device], Tensor] = {}


class StateWindow:
    """Gives float32 states to work on in place, and stores them again. For any number of threads.

    For each it keeps memory for one part of each state; states that are stored as float32 are worked on where they are.
    """

    def __init__(self, form: StateFormat) -> None:
        self._form = form
        self._of_thread = _Scratch()

    def parts(
        self, stored: Mapping[str, Tensor], numel: int, noise: Callable[[str, int], Noise]
    ) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
        """Open a piece of a parameter. What is changed in a part is stored when the next one is asked for.

        Args:
            stored: for each state, `StateFormat.part` for the piece.
            numel: elements of the piece.
            noise: for a state and a part, given by its first element in the piece.

        Yields:
            Elements of the piece, from the first on, and their states: float32, 1-D. Parts are cut at multiples of 64
            elements.
        """
        if self._form is StateFormat.FP32:
            yield slice(0, numel), stored
            return
        is_on_host = all(values.device.type == "cpu" for values in stored.values())
        part_numel = _HOST_NUMEL if is_on_host else _DEVICE_NUMEL
        for start in range(0, numel, part_numel):
            span = slice(start, min(start + part_numel, numel))
            places = {name: self._form.part(values, span) for name, values in stored.items()}
            views = {
                name: self._memory(name, place.device, part_numel)[: span.stop - start]
                for name, place in places.items()
            }
            for name, place in places.items():
                decode(self._form, name, place, views[name])
            yield span, views
            for name, place in places.items():
                encode(self._form, name, views[name], place, noise(name, start))

    def _memory(self, name: str, device: torch.device, numel: int) -> Tensor:
        scratch = self._of_thread.tensors
        found = scratch.get((name, device))
        if found is None:
            found = scratch[name, device] = torch.empty(numel, dtype=torch.float32, device=device)
        return found
