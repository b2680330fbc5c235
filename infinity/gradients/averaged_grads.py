"""Main gradients that several ranks average. See [Note: ranks] in ``infinity.distributed.collectives``.

Knows units, gradients and ranks; must not know when a backward has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from infinity.distributed.collectives import Ranks
from infinity.errors import RankError
from infinity.gradients.shown_grads import ShownGradients
from infinity.gradients.unit_grads import UnitGrads
from infinity.units.layout import SLOT_GRANULE, Slot
from infinity.units.unit import Unit

_IS_NEW, _IS_UNSCALED = 1, 2


class AveragedGradients(ShownGradients):
    """`ShownGradients` that know which of them are this rank's alone.

    As with DDP, what is averaged is all that a parameter has accumulated, so a mean of an earlier backward stays what it is.
    A parameter that got a gradient on some ranks has one on all of them afterwards, to which the others gave zeros.
    """

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any) -> None:
        """As `ShownGradients`, and ``ranks``: who averages."""
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._new: set[tuple[int, int]] = set()
        """(unit index, slot index) of what was added since the last `average`."""

    def add(self, unit: Unit, gradients: Mapping[Slot, torch.Tensor]) -> None:
        """See `MainGradStore.add`."""
        super().add(unit, gradients)
        self._new.update((unit.index, slot.index) for slot in gradients)

    def set_gradient(self, unit: Unit, slot: Slot, gradient: torch.Tensor | None) -> None:
        """See `ShownGradients.set_gradient`. It is taken as it is: whoever sets one does so on all ranks."""
        super().set_gradient(unit, slot, gradient)
        self._new.discard((unit.index, slot.index))

    def clear(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """See `MainGradStore.clear`."""
        super().clear(kept)
        self._new.intersection_update(kept)

    def average(self, step: int) -> None:
        """What came on any rank since the last time becomes the mean over all ranks, on all of them.

        All ranks call it at the same point of their scripts.

        Args:
            step: the number of the present step.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        if self._ranks.num == 1:
            return
        what = f"averaging gradients in step {step}"
        flags: list[int] = []
        for grads in self._grads:
            flags += [(grads.unit.index, slot.index) in self._new for slot in grads.unit.layout.slots]
            flags.append(grads.is_unscaled * _IS_UNSCALED)
        merged = [max(of_ranks) for of_ranks in zip(*self._ranks.meet(what, flags), strict=True)]
        self._new.clear()
        position = 0
        for grads in self._grads:
            slots = grads.unit.layout.slots
            of_unit = merged[position : position + len(slots) + 1]
            position += len(of_unit)
            new = [slot for slot, flag in zip(slots, of_unit, strict=False) if flag == _IS_NEW]
            if new:
                with self._clock.waiting("gradients"):
                    self._average(grads, new, what, is_unscaled=of_unit[-1] == _IS_UNSCALED)

    def check_all_held(self, loose: Iterable[torch.Tensor], step: int) -> None:
        """See that there are no ``loose`` parameters in the groups, whose gradients nobody averages.

        Raises:
            RankError: there are.
        """
        if self._ranks.num > 1 and any(True for _ in loose):
            raise RankError(
                f"step {step}",
                "parameters are in a group that infinity.initialize did not take over, and their gradients are not averaged",
                rank=self._ranks.index,
                cure="Put all parameters into the model before infinity.initialize, or train in one process",
            )

    def check_same(self, norm: torch.Tensor, step: int) -> None:
        """See that all ranks have the same 2-norm of all gradients (0-dim fp32), bit for bit.

        Raises:
            RankError: they have not.
        """
        bits = int(norm.detach().cpu().float().view(torch.int32))
        of_ranks = [found[0] for found in self._ranks.meet(f"the norm of all gradients in step {step}", [bits])]
        if any(found != bits for found in of_ranks):
            norms = torch.tensor(of_ranks, dtype=torch.int32, device="cpu").view(torch.float32).tolist()
            raise RankError(
                f"the norm of all gradients in step {step}",
                f"it is {norms} on the ranks from 0 on",
                rank=self._ranks.index,
                cure="Whoever changes gradients between backward and step has to do the same on all ranks, and parameters "
                "that were frozen in infinity.initialize cannot be trained on several",
            )

    def _average(self, grads: UnitGrads, slots: list[Slot], what: str, *, is_unscaled: bool) -> None:
        buffer = self.show(grads.unit) if is_unscaled else self.open(grads.unit)
        grads.note_change()
        runs: list[tuple[int, int]] = []
        for slot in sorted(slots, key=lambda slot: slot.start):
            if slot.index not in grads.present:
                buffer.view(slot).zero_()
                grads.present.add(slot.index)
            if runs and slot.start - runs[-1][1] < SLOT_GRANULE:  # nothing but padding lies between
                runs[-1] = runs[-1][0], slot.stop
            else:
                runs.append((slot.start, slot.stop))
        for start, stop in runs:
            self._ranks.average(what, buffer.values[start:stop])
        self.close_sum(grads.unit)
