"""1-bit Adam's momenta: each rank adds its own gradients to the common momentum, and the ranks' mean is compressed.

[Note: momenta instead of means] After the warm-up (`infinity.optim.classes`) no mean of gradients is computed: until
the step, each rank keeps its own. In the step each rank reads the old momentum of a parameter, which is the same on
all, and adds its gradient. The compressed mean of that takes the gradient's place (`compressed_mean`), and the update
uses it as the new momentum. That needs the whole momentum on each rank: ZeRO's stage 0. A step in which a parameter
still in its warm-up gets a gradient exchanges whole means, as before.

Clipping is each rank's own, by the norm of its own gradients, as in DeepSpeed. The error feedback (what signs left out)
is in no checkpoint: it begins with zeros when a parameter's step count differs from the one after the last exchange, as
in DeepSpeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from infinity.device.drive_tensors import write_out
from infinity.distributed.collectives import Ranks
from infinity.distributed.sign_compression import ErrorFeedback, compressed_mean, server_numel
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
                "OneBitAdam: momenta are exchanged as signs from now on; what those leave out takes about %d MB on each rank",
                num_bytes * (1 + self.ranks.num) // self.ranks.num // 1_000_000,
            )
        groups = self.wrapped_optimizer.read()
        for each in new:
            beta1 = {slot: group["betas"][0] for slot, group in _grouped(each, groups)}
            with gradients.replacing(each) as (buffer, scale):
                self._add_to_momenta(each.unit, beta1, factor(scale), buffer)
                values = [buffer.values[slot.start : slot.stop] for slot in beta1]
                errors = [self._error_of(each.unit, slot) for slot in beta1]
                compressed_mean(self.ranks, what, values, errors, kind=_KIND)
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
            errors = ErrorFeedback(self.zeros(slot.numel), self.zeros(server_numel(slot.numel, self.ranks)))
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
