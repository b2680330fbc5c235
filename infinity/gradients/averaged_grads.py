"""Main gradients that several ranks average. See [Note: ranks] in ``infinity.distributed.collectives``.

Knows units, gradients and ranks; must not know when a backward has ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.distributed.agreement import together
from infinity.distributed.collectives import Ranks
from infinity.distributed.comm_hooks import GradientBucket, MeanHook
from infinity.errors import AccessError, RankError
from infinity.gradients.share_updates import ShareUpdates
from infinity.gradients.shown_grads import ShownGradients
from infinity.gradients.sources import GradientBuffer
from infinity.units.layout import Slot
from infinity.units.shares import runs_of
from infinity.units.unit import Unit

_IS_NEW, _IS_UNSCALED = 1, 2


@dataclass(frozen=True)
class NewGradients:
    """Gradients of a unit that came on any rank since they were last averaged.

    Attributes:
        unit: whose.
        slots: of which parameters, in the order of the layout.
        is_unscaled: whether any rank has taken the loss scale out.
    """

    unit: Unit
    slots: list[Slot]
    is_unscaled: bool


class AveragedGradients(ShownGradients):
    """`ShownGradients` that know which of them are this rank's alone.

    As with DDP, what is averaged is all that a parameter has accumulated, so a mean of an earlier backward stays what it is.
    A parameter that got a gradient on some ranks has one on all of them afterwards, to which the others gave zeros.

    Where `holds_back` says so, no mean is computed before the step either: that begins with `new_of_all`, and goes on with
    `average_these`, or `replace`.
    """

    def __init__(
        self,
        *args: Any,
        ranks: Ranks,
        holds_back: Callable[[], bool],
        wire: torch.dtype,
        **kwargs: Any,
    ) -> None:
        """As `ShownGradients`, and ``ranks``: all that have the same part of the model; ``wire``: see `Ranks.reduce`."""
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._holds_back = holds_back
        self._wire = wire
        self._hook: MeanHook | None = None
        self._is_held_back = False
        """Whether a mean that would have been computed was not: from then until the step."""
        self._new: set[tuple[int, int]] = set()
        """(unit index, slot index) of what was added since the last `average`."""
        self.agreed_norms: dict[tuple[int, int], torch.Tensor] = {}
        """(unit index, slot index) -> 2-norm of a mean that may be here in part only, or have gone into an update: from
        `average_for_update` until the next step's, or `clear`."""

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        super().add(unit, gradients)
        for slot in gradients:
            self._new.add((unit.index, slot.index))

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """See `ShownGradients.set_gradient`. It is taken as it is: whoever sets one does so on all ranks."""
        super().set_gradient(unit, slot, gradient)
        self._new.discard((unit.index, slot.index))

    def clear(self, kept: Collection[tuple[int, int]] = ()) -> None:
        super().clear(kept)
        self._new.intersection_update(kept)
        self._is_held_back = False

    def check_averaged(self, unit: Unit, slot: Slot) -> None:
        """See that the gradient is not one of which only parts of the mean will ever be here.

        Raises:
            AccessError: it is.
        """
        if self._is_held_back and (unit.index, slot.index) in self._new:
            raise AccessError.of_gradient(
                slot.spec.fqn,
                reason="OneBitAdam's warm-up is over: each process has its own gradients, and in the step their momenta are "
                "exchanged",
                cure='Clip by "gradient_clipping" in the config; to look at gradients, train with Adam',
            )

    def begin_means(self, step: int, updates: ShareUpdates | None = None) -> bool:
        """The last ``engine.backward`` of a step begins: `offer` tells of units that have all of its gradients.

        Returns whether ``updates`` will hear of means before the step.
        """
        return False

    def expect_whole(self, unit: Unit) -> None:
        """The next `add` for the unit makes it whole."""

    def offer(self, unit: Unit) -> bool:
        """The unit has all gradients of the step. Returns whether that is of use: then it may stay where `open_sum` has it."""
        return False

    @property
    def is_in_parts(self) -> bool:
        """Whether a gradient that is not here may be on other ranks, of which this one has a part of the mean, or will have."""
        return False

    def average_last(self, step: int) -> None:
        """The last ``engine.backward`` of a step has ended: as `average`, at once or by the time the step needs it."""
        self.average(step)

    def average_postponed(self) -> None:
        """Another backward comes before the step: the mean of what was there before it is computed, if it has not been."""

    def end_updates(self) -> None:
        """A step is given up whose last backward has begun. All ranks come here: what all have left to `ShareUpdates` has been
        updated on all of them when this returns, and nothing else."""

    def average(self, step: int) -> None:
        """What came on any rank since the last time becomes the mean over all ranks, on all of them.

        All ranks call it at the same point of their scripts.

        Args:
            step: the number of the present step.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if self._holds_back():
            self._is_held_back = True
        else:
            self.average_these(self.new_of_all(step), step)

    def new_of_all(self, step: int, what: str = "averaging gradients") -> list[NewGradients]:
        """What came on any rank since the last time, which the caller goes on with: unit by unit. See `average`."""
        self._is_held_back = False
        if self._ranks.num == 1:
            return []
        self._land()
        flags: list[int] = []
        for grads in self._grads:
            flags += [(grads.unit.index, slot.index) in self._new for slot in grads.unit.layout.slots]
            flags.append(grads.is_unscaled * _IS_UNSCALED)
        merged = [max(of_ranks) for of_ranks in zip(*self._ranks.meet(f"{what} in step {step}", flags), strict=True)]
        self._new.clear()
        position = 0
        found: list[NewGradients] = []
        for grads in self._grads:
            slots = grads.unit.layout.slots
            of_unit = merged[position : position + len(slots) + 1]
            position += len(of_unit)
            new = [slot for slot, flag in zip(slots, of_unit, strict=False) if flag == _IS_NEW]
            if new:
                found.append(NewGradients(grads.unit, new, of_unit[-1] == _IS_UNSCALED))
        return found

    def average_these(self, found: Sequence[NewGradients], step: int) -> None:
        """As `average`, of these."""
        what = f"averaging gradients in step {step}"
        for new in found:
            with self._clock.waiting("ranks"):
                buffer, runs = self._prepare(new)
                if self._hook is not None:
                    self._hook.average(what, _bucket(buffer, new, is_last=new is found[-1]))
                else:
                    for start, stop in runs:
                        self._ranks.average(what, buffer.values[start:stop], self._wire)
                self.close_sum(new.unit)

    def take_hook(self, hook: MeanHook | None) -> None:
        """From now on ``hook`` averages, of whole gradients; None: nothing but this does."""
        self._hook = hook

    def replace(self, new: NewGradients, write: Callable[[GradientBuffer, float], None]) -> None:
        """``write`` gets the unit's gradients in memory and the loss scale they have, and puts what has none in their place."""
        with self._clock.waiting("ranks"):
            buffer, _ = self._prepare(new)
            write(buffer, self.scale_of(new.unit))
            self._grads[new.unit.index].is_unscaled = True
            self.close_sum(new.unit)

    def average_for_update(self, step: int) -> None:
        """As `average`; an update of all comes next."""
        self.average(step)

    def check_all_held(self, loose: Iterable[torch.Tensor], step: int) -> None:
        """See that there are no ``loose`` parameters in the groups, whose gradients nobody averages.

        Raises:
            RankError: there are.
        """
        if self._ranks.num > 1 and any(True for _ in loose):
            raise RankError(
                f"step {step}",
                "parameters are in a group that infinity.initialize did not take over, and their gradients are not averaged",
                rank=self._ranks.number,
                cure="Put all parameters into the model before infinity.initialize, or train in one process",
            )

    @staticmethod
    def digest(described: Mapping[str, str]) -> int:
        """A checksum of hyperparameters, by name: above 0."""
        return 1 + zlib.crc32(repr(sorted(described.items())).encode())

    def check_same_groups(self, describe: Callable[[], Mapping[str, str]], step: int) -> None:
        """See that all ranks have the same hyperparameters.

        Args:
            describe: gives them by name.
            step: for messages.

        Raises:
            RankError: they have not.
        """
        if self._ranks.num == 1:
            return
        what = f"the parameter groups in step {step}"
        own = describe()
        digest = self.digest(own)
        if all(found == [digest] for found in self._ranks.meet(what, [digest])):
            return
        told = together(self._ranks, what, lambda: dict(own))
        for key in {key: None for of_rank in told for key in of_rank}:
            values = [of_rank.get(key, "absent") for of_rank in told]
            if len({*values}) > 1:
                pairs = zip(self._ranks.members, values, strict=True)
                problem = f"{key} is " + ", ".join(f"{value} on rank {number}" for number, value in pairs)
                cure = "Set the same on all ranks; where a schedule follows a metric, give it the mean over all of them"
                raise RankError(what, problem, rank=self._ranks.number, cure=cure)

    def check_same(self, norm: torch.Tensor, step: int) -> None:
        """See that all ranks have the same 2-norm of all gradients (0-dim fp32), bit for bit.

        Raises:
            RankError: they have not.
        """
        if self._ranks.num == 1:
            return
        bits = int(norm.detach().cpu().float().view(torch.int32))
        of_ranks = [found[0] for found in self._ranks.meet(f"the norm of all gradients in step {step}", [bits])]
        if any(found != bits for found in of_ranks):
            norms = torch.tensor(of_ranks, dtype=torch.int32, device="cpu").view(torch.float32).tolist()
            raise RankError(
                f"the norm of all gradients in step {step}",
                f"it is {norms} on the ranks {self._ranks.names(range(self._ranks.num))}",
                rank=self._ranks.number,
                cure="Whoever changes gradients between backward and step has to do the same on all ranks, and parameters "
                "that were frozen in infinity.initialize cannot be trained on several",
            )

    def _prepare(self, new: NewGradients) -> tuple[GradientBuffer, list[tuple[int, int]]]:
        """The unit's gradients in memory, zeros where there are none, and the elements in which the new ones lie."""
        grads = self._grads[new.unit.index]
        buffer = self.show(grads.unit) if new.is_unscaled else self.open(grads.unit)
        grads.note_change()
        for slot in new.slots:
            if slot.index not in grads.present:
                buffer.view(slot).zero_()
                grads.present.add(slot.index)
        return buffer, runs_of(new.slots)


def _bucket(buffer: GradientBuffer, new: NewGradients, *, is_last: bool) -> GradientBucket:
    slots = new.unit.layout.slots
    parameters = [new.unit.parameters[slot.index] for slot in slots]
    views, are_new = [buffer.view(slot) for slot in slots], [slot in new.slots for slot in slots]
    return GradientBucket(new.unit.index, parameters, views, are_new, is_last=is_last)
