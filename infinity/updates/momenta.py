"""1-bit Adam's momenta: each rank adds its own gradients to the common momentum, and the ranks' mean is compressed.

[Note: momenta instead of means] After the warm-up (`infinity.optim.classes`) no mean of gradients is computed: until
the step, each rank keeps its own. In the step each rank reads the old momentum of a parameter, which is the same on
all, and adds its gradient. The compressed mean of that takes the gradient's place (`compressed_mean`), and the update
uses it as the new momentum. That needs the whole momentum on each rank: ZeRO's stage 0. A step in which a parameter
still in its warm-up gets a gradient exchanges whole means, as before.

Clipping is each rank's own, by the norm of its own gradients, as in DeepSpeed. The error feedback (what signs left out)
is in no checkpoint: it begins with zeros when a parameter's step count differs from the one after the last exchange, as
in DeepSpeed.

[Note: signs and scales] `compressed_mean` computes the mean over all ranks with one bit per element, as 1-bit Adam does
it (arXiv 2102.02888, section 4.2). Each rank adds what its last signs have left out to its values. It sends the signs of
them, and the root of their mean square: to each rank a part, as a server. The server takes the mean of what it got, adds
what its own last signs have left out, and sends signs and scale of that to all. So each element crosses twice, as in an
exchange of fp32, with one bit in place of 32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy
import torch

from infinity.device.drive_tensors import write_out
from infinity.distributed.collectives import Ranks
from infinity.gradients.main_gradients import GradientBuffer
from infinity.gradients.rank_checks import norms_of_ranks
from infinity.gradients.reducer import NewGradients, ReducedGradients
from infinity.optim.groups import Groups
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.tiers.state_store import StateStore
from infinity.units.layout import Chunk, Slot
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState

logger = logging.getLogger(__name__)
_MOMENTUM = "exp_avg"
_KIND = "momenta"  # of the exchanged bytes, in reports
_SCALE_BYTES = 4


@dataclass(frozen=True)
class ErrorFeedback:
    """What the signs of one tensor have left out so far, fp32, 1-D: zeros at first.

    Attributes:
        worker: of this rank's values, as many as there are.
        server: of the part of the mean that this rank computes; see `_parts`.
    """

    worker: torch.Tensor
    server: torch.Tensor


@dataclass(eq=False, repr=False)
class CompressedMomenta:
    """Exchanges momenta in place of gradients; see [Note: momenta instead of means].

    Args:
        units: all units, by index.
        chunks: of each unit, all.
        records, states: where momenta and step counts are.
        wrapped_optimizer: knows the groups.
        ranks: all of them.
        await_update: returns when a unit has no pending update.
        zeros: makes fp32 memory, 1-D, for what is left out.
    """

    units: Sequence[Unit]
    chunks: Sequence[Sequence[Chunk]]
    _: KW_ONLY
    records: StateStore
    states: dict[tuple[int, int], ParameterState]
    wrapped_optimizer: WrappedOptimizer
    ranks: Ranks
    await_update: Callable[[Unit], None]
    zeros: Callable[[int], torch.Tensor]
    _errors: dict[tuple[int, int], tuple[ErrorFeedback, int]] = field(init=False, default_factory=dict)
    """(unit index, slot index) -> what was left out, and the step count for which that is; see the module's note."""

    def is_active(self) -> bool:
        """Whether any parameter is past its warm-up. All ranks call it between the same steps, and get the same answer."""
        freeze_step = min((group["freeze_step"] for group in self.wrapped_optimizer.param_groups), default=0)
        return any(
            self._step_of(unit, slot) >= freeze_step
            for unit in self.units
            for slot in unit.layout.slots
            if (unit.index, slot.index) in self.states
        )

    def is_due(self, new: Sequence[NewGradients]) -> bool:
        """Whether all of these that are in a group are past their warm-ups."""
        groups = self.wrapped_optimizer.read()
        found = [
            self._step_of(each.unit, slot) >= group["freeze_step"]
            for each in new
            for slot, group in _grouped(each, groups)
        ]
        return bool(found) and all(found)

    def largest(self, norm: torch.Tensor, step: int) -> torch.Tensor:
        """The largest of the norms (0-dim, fp32) that the ranks have; NaN if any is.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        # torch's `max` returns NaN if any value is NaN.
        return norms_of_ranks(self.ranks, f"norms of gradients in step {step}", norm).max()

    def exchange(
        self,
        gradients: ReducedGradients,
        new: Sequence[NewGradients],
        factor: Callable[[float], torch.Tensor | None],
        step: int,
    ) -> None:
        """Momenta take the place of these gradients, which may be missing on this rank.

        Args:
            gradients: of this rank.
            new: which, on any rank.
            factor: with what gradients of a loss scale are multiplied.
            step: its number, for messages.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        what = f"exchanging momenta in step {step}"
        if not self._errors:
            # A worker error of 4 bytes per element, and the same of this rank's part of the server: 1 + 1 / ranks.
            num_bytes = sum(4 * slot.numel for each in new for slot in each.slots)
            logger.info(
                "OneBitAdam: momenta are exchanged as signs from now on; the error of the signs takes about %d MB on each rank",
                num_bytes * (1 + self.ranks.num) // self.ranks.num // 1_000_000,
            )
        groups = self.wrapped_optimizer.read()
        for each in new:
            beta1 = {slot: group["betas"][0] for slot, group in _grouped(each, groups)}
            with gradients.replacing(each) as (buffer, scale):
                self._add_to_momenta(each.unit, beta1, factor(scale), buffer)
                values = [buffer.values[slot.start : slot.stop] for slot in beta1]
                errors = [self._error_of(each.unit, slot) for slot in beta1]
                compressed_mean(self.ranks, what, values, errors)
        # Errors may be tensors on a drive: they are written before the step ends.
        write_out()

    def _add_to_momenta(
        self, unit: Unit, beta1: Mapping[Slot, float], multiplier: torch.Tensor | None, buffer: GradientBuffer
    ) -> None:
        """The gradients of these parameters become this rank's new momenta."""
        for chunk in self.chunks[unit.index]:
            slices = [param_slice for param_slice in chunk.slices if param_slice.slot in beta1]
            if not slices:
                continue
            # A blocking lease waits for a staging buffer. It only reads: `discard` gives the buffer back without a
            # write.
            lease = self.records.open(unit, chunk, is_blocking=True, needs_scratch=False)
            if lease is None:
                raise RuntimeError("a blocking lease gave nothing")
            try:
                lease.wait()
                for param_slice in slices:
                    start = param_slice.slot.start + param_slice.start
                    gradient = buffer.values[start : start + param_slice.numel]
                    # Unscaled and clipped before it is added: the momentum holds gradients in that form.
                    if multiplier is not None:
                        gradient.mul_(multiplier.cpu())
                    momentum = torch.empty_like(gradient)
                    span = slice(param_slice.offset, param_slice.offset + param_slice.numel)
                    lease.workspace.read(_MOMENTUM, span, momentum)
                    # momentum = beta1 * momentum + (1 - beta1) * gradient, in the memory of the gradient.
                    torch.lerp(momentum, gradient, 1 - beta1[param_slice.slot], out=gradient)
            finally:
                lease.discard()

    def _error_of(self, unit: Unit, slot: Slot) -> ErrorFeedback:
        key, count = (unit.index, slot.index), self._step_of(unit, slot)
        errors, known = self._errors.get(key, (None, -1))
        if errors is None:
            start, stop = _parts(slot.numel, self.ranks.num)[self.ranks.index]
            errors = ErrorFeedback(self.zeros(slot.numel), self.zeros(stop - start))
        elif known != count:
            errors.worker.zero_()
            errors.server.zero_()
        # The update that follows counts one step: so much is expected at the next exchange.
        self._errors[key] = errors, count + 1
        return errors

    def _step_of(self, unit: Unit, slot: Slot) -> int:
        self.await_update(unit)
        state = self.states.get((unit.index, slot.index))
        return 0 if state is None or state.is_fresh else int(state.scalars["step"])


def _grouped(new: NewGradients, groups: Groups) -> list[tuple[Slot, dict[str, Any]]]:
    found = [(slot, groups.of(new.unit.parameters[slot.index])) for slot in new.slots]
    return [(slot, group) for slot, group in found if group is not None]


def compressed_mean(ranks: Ranks, what: str, values: Sequence[torch.Tensor], errors: Sequence[ErrorFeedback]) -> None:
    """Each of ``values`` becomes its compressed mean over all ranks, with the same bits on all.

    Args:
        ranks: all come with as many values.
        what: for messages.
        values: 1-D, fp32, on the CPU; each is compressed by itself.
        errors: of each, by the calls before; changed in place.
    """
    parts = [_parts(each.numel(), ranks.num) for each in values]
    widths = [_width(each.numel(), ranks.num) // 8 for each in values]
    sizes = [*widths, _SCALE_BYTES * len(values)]
    sent = torch.zeros((ranks.num, sum(sizes)), dtype=torch.uint8, device="cpu")
    *places, last = sent.split(sizes, dim=1)
    scales = torch.zeros(len(values), dtype=torch.float32, device="cpu")
    for each, left, place, scale in zip(values, errors, places, scales, strict=True):
        left.worker.add_(each)
        signs = _pack_signs(left.worker, scale)
        place.copy_(torch.nn.functional.pad(signs, (0, place.numel() - signs.numel())).view(place.shape))
    last.copy_(scales.view(torch.uint8))
    *received, last = ranks.all_to_all(what, sent, kind=_KIND).split(sizes, dim=1)
    received_scales = last.clone().view(torch.float32)
    own = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
    *places, last = own.split(sizes)
    for index, (left, place) in enumerate(zip(errors, places, strict=True)):
        mean = torch.zeros(left.server.numel(), dtype=torch.float32, device="cpu")
        for row, scale in zip(received[index], received_scales[:, index], strict=True):
            mean.add_(_decoded(row, mean.numel(), scale))
        left.server.add_(mean, alpha=1.0 / ranks.num)
        signs = _pack_signs(left.server, scales[index])
        place[: signs.numel()] = signs
    last.copy_(scales.view(torch.uint8))
    *found, last = ranks.all_gather(what, own, kind=_KIND).split(sizes, dim=1)
    found_scales = last.clone().view(torch.float32)
    for index, (each, of_ranks) in enumerate(zip(values, parts, strict=True)):
        for row, scale, (start, stop) in zip(found[index], found_scales[:, index], of_ranks, strict=True):
            each[start:stop] = _decoded(row, stop - start, scale)


def _width(numel: int, num: int) -> int:
    """Elements of the longest part: whole bytes of signs."""
    return -(-numel // (8 * num)) * 8


def _parts(numel: int, num: int) -> list[tuple[int, int]]:
    width = _width(numel, num)
    return [(min(rank * width, numel), min((rank + 1) * width, numel)) for rank in range(num)]


def _pack_signs(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Signs of ``values``, packed (uint8), whose scale is put into ``scale``; ``values`` become what the two leave out."""
    if not values.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    scale.copy_(torch.linalg.vector_norm(values) / math.sqrt(values.numel()))
    is_positive = values >= 0
    values.add_(torch.where(is_positive, -scale, scale))
    return torch.from_numpy(numpy.packbits(is_positive.numpy()))


def _decoded(signs: torch.Tensor, numel: int, scale: torch.Tensor) -> torch.Tensor:
    is_positive = torch.from_numpy(numpy.unpackbits(signs.numpy(), count=numel)).bool()
    return torch.where(is_positive, scale, -scale)
