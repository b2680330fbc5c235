"""Communication hooks of torch.distributed (PowerSGD, a cast before the all-reduce) in place of the exchange in fp32.

Knows tensors, and what torch's hooks ask of a bucket; must not know when gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.errors import RankError


class GradientBucket:
    """What a hook asks torch's ``GradBucket``, which Python cannot make: the gradients of one unit, fp32, in memory."""

    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        are_new: Sequence[bool],
        *,
        is_last: bool,
    ) -> None:
        """
        Args:
            index: the same for the same unit in each step.
            parameters: of the unit.
            gradients: of each of them. The bucket gets a copy of those that ``are_new``, zeros for the others.
            is_last: whether no other bucket follows before the next backward.
        """
        self._index = index
        self._parameters = list(parameters)
        self._gradients = gradients
        self._are_new = are_new
        self._is_last = is_last
        numel = sum(each.numel() for each in gradients)
        self._buffer = torch.zeros(numel, dtype=torch.float32, device="cpu")
        for place, gradient in self._new_of(self._buffer):
            place.copy_(gradient)

    def index(self) -> int:
        """Its number, by which a hook knows it again."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one before the next backward."""
        return self._is_last

    def parameters(self) -> list[torch.Tensor]:
        """The unit's parameters; what they hold may be on a drive."""
        return self._parameters

    def buffer(self) -> torch.Tensor:
        """All gradients, 1-D, one after the other; zeros for parameters that got none."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Another tensor takes the place of `buffer`, with as many elements."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, with its shape: views of `buffer`."""
        return self._views(self._buffer)

    def write_back(self, means: torch.Tensor) -> None:
        """Gradients that are new become what stands in ``means``, which is like `buffer`."""
        for mean, gradient in self._new_of(means):
            gradient.copy_(mean)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        parts = buffer.split([each.numel() for each in self._gradients])
        return [part.as_strided(each.shape, each.stride()) for part, each in zip(parts, self._gradients, strict=True)]

    def _new_of(self, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = zip(self._views(buffer), self._gradients, self._are_new, strict=True)
        return [(view, gradient) for view, gradient, is_new in found if is_new]


class MeanHook:
    """A script's hook, as ``DistributedDataParallel.register_comm_hook`` takes it, with its state."""

    def __init__(self, state: Any, hook: Callable[[Any, Any], Any], rank: int) -> None:
        """``state``, ``hook``: as the script gave them; ``rank``: this process, for messages."""
        self._state = state
        self._hook = hook
        self._rank = rank

    def average(self, what: str, bucket: GradientBucket) -> None:
        """The bucket's new gradients become what the hook makes of them. ``what``: for messages.

        Raises:
            RankError: the hook gave no tensor of as many elements.
        """
        numel = bucket.buffer().numel()
        found = self._hook(self._state, bucket)
        found = found.wait() if hasattr(found, "wait") else found
        if not isinstance(found, torch.Tensor) or found.numel() != numel:
            raise RankError(
                what,
                f"the communication hook {getattr(self._hook, '__name__', self._hook)} gave {_described(found)}, not a Future of "
                f"a tensor of {numel} elements",
                rank=self._rank,
                cure="Return one that holds what becomes of bucket.buffer(), as torch.distributed's hooks do",
            )
        bucket.write_back(found.detach().reshape(-1))


def _described(found: Any) -> str:
    return f"a tensor of {found.numel()}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
