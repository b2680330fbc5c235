"""Whether a checkpoint is of the model that is to take it: what only one of them has is refused, or told of where it may be.

Of frozen parameters that it leaves out it knows checksums, so that it is not loaded beside other ones: they cost one read of
these weights, when a checkpoint is saved and when it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from infinity.checkpoint.saved import Checkpoint, SavedTensor
from infinity.errors import ModelError, listed
from infinity.loop.pager import Pager
from infinity.numerics.raw_bytes import raw_bytes
from infinity.optim.groups import TiledGroups
from infinity.paging.parameter_map import ParameterMap
from swapper.wrappers.checksum import crc32c

logger = logging.getLogger(__name__)
_PIECE_BYTES = 1 << 20
Checksums = dict[str, tuple[str, int]]
"""FQN -> dtype, and crc32c of the elements in C order."""


class LeftOut:
    """Looks at the values of frozen parameters; must not know what a checkpoint does with checksums."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], hooks: ParameterMap, pager: Pager, tiled: TiledGroups
    ) -> None:
        """``parameters``: by FQN, in an order in which those of a unit stand together."""
        self._parameters = parameters
        self._hooks = hooks
        self._pager = pager
        self._tiled = tiled

    def checksums(self, fqns: Collection[str]) -> Checksums:
        """Of the values of these as they are now."""
        found = {}
        for fqn, parameter in self._parameters.items():
            if fqn not in fqns:
                continue
            checksum = 0
            for part in self._tiled.all_of(parameter):
                for piece in self._pieces(part):
                    checksum = crc32c(piece.numpy(), after=checksum)
            found[fqn] = str(self._tiled.all_of(parameter)[0].dtype).removeprefix("torch."), checksum
        return found

    def check(self, fqns: Collection[str], saved: Mapping[str, tuple[str, int]]) -> None:
        """Compare these with what a checkpoint has. What it does not know, or has another dtype now, cannot be compared.

        Raises:
            ModelError: some are others than when the checkpoint was written.
        """
        others, casts = [], []
        for fqn, (dtype, checksum) in self.checksums(saved.keys() & fqns).items():
            if dtype != saved[fqn][0]:
                casts.append(fqn)
            elif checksum != saved[fqn][1]:
                others.append(fqn)
        if others:
            shown = listed([f"'{fqn}'" for fqn in others])
            raise ModelError(
                f"the checkpoint was written without frozen parameters, and those of the model have other values now: {shown}",
                cure="Load the weights with which it was trained before infinity.initialize, or pass load_module_strict=False "
                "to take those that are there",
            )
        if casts:
            logger.warning(
                "%d frozen parameters that the checkpoint leaves out ('%s', ...) have another dtype than when it was written: "
                "whether they have the same values is not known",
                len(casts),
                casts[0],
            )

    def _pieces(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        if not self._hooks.holds(parameter):
            yield from _bytes_of(parameter.detach())
            return
        unit, slot = self._hooks.locate(parameter)
        with self._pager.opened(unit):
            yield from _bytes_of(unit.weight(slot).detach())


def _bytes_of(values: torch.Tensor) -> Iterator[torch.Tensor]:
    rows = values.reshape(1) if not values.dim() else values
    num = max(_PIECE_BYTES // max(rows[:1].nbytes, 1), 1)
    for start in range(0, rows.shape[0] if rows.numel() else 0, num):
        yield raw_bytes(rows[start : start + num].cpu())


def other_shapes(saved: Mapping[str, SavedTensor], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What says so of each tensor whose shape is another one."""
    both = ((fqn, saved[fqn].shape, shape) for fqn, shape in wanted.items() if fqn in saved)
    return [f"'{fqn}' has shape {there}, not {here}" for fqn, there, here in both if there != here]


class SameModel:
    """The checks of one load."""

    def __init__(self, *, is_strict: bool) -> None:
        """``is_strict``: what only one of both has is an error, not only another shape."""
        self._is_strict = is_strict
        self._missing: list[str] = []
        self._extra: list[str] = []

    def shapes(
        self, group: str, saved: Checkpoint, wanted: Mapping[str, tuple[int, ...]], left_out: Collection[str] = ()
    ) -> None:
        """Parameters or buffers, by name. ``left_out`` may be missing.

        Raises:
            ModelError: says which do not fit.
        """
        found = saved.of(group)
        needed = [fqn for fqn in wanted if fqn in found or fqn not in left_out]
        self.names(group, needed, found, other_shapes(found, wanted))

    def names(
        self, group: str, wanted: Collection[str], found: Collection[str], problems: Collection[str] = ()
    ) -> None:
        """Of whatever the model wants and the checkpoint has, beside the problems that there are.

        Raises:
            ModelError: says which only one of them has.
        """
        missing, extra = [each for each in wanted if each not in found], [each for each in found if each not in wanted]
        if self._is_strict:
            problems = [*problems, *(f"'{fqn}' is missing" for fqn in missing)]
            problems += [f"'{fqn}' is not in the model" for fqn in extra]
        else:
            self._missing += missing
            self._extra += extra
        if problems:
            raise ModelError(
                f"the checkpoint's {group} are not the model's: {listed(problems, '; ')}",
                cure="Make the model as it was, or pass load_module_strict=False to leave out what only one of them has",
            )

    def tell(self, place: object) -> None:
        """Log what was let pass, in one line."""
        sides = {"not in the checkpoint, and as before": self._missing, "not in the model, and left out": self._extra}
        told = [f"{listed([*map(repr, names)])} ({how})" for how, names in sides.items() if names]
        if told:
            logger.warning("load_module_strict=False, '%s' is not all of this model: %s", place, "; ".join(told))
