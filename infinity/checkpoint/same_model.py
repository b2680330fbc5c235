"""Whether a checkpoint is of the model that is to take it: what only one of them has is refused, or told of where it may be."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from infinity.checkpoint.saved import Checkpoint
from infinity.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

_MOST_SHOWN = 4


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
            UnsupportedModelError: says which do not fit.
        """
        found = saved.of(group)
        problems = [
            f"'{fqn}' has shape {found[fqn].shape}, not {shape}"
            for fqn, shape in wanted.items()
            if fqn in found and found[fqn].shape != shape
        ]
        self.names(group, [fqn for fqn in wanted if fqn in found or fqn not in left_out], found, problems)

    def names(
        self, group: str, wanted: Collection[str], found: Collection[str], problems: Collection[str] = ()
    ) -> None:
        """Of whatever the model wants and the checkpoint has, beside the problems that there are.

        Raises:
            UnsupportedModelError: says which only one of them has.
        """
        missing, extra = [each for each in wanted if each not in found], [each for each in found if each not in wanted]
        if self._is_strict:
            problems = [*problems, *(f"'{fqn}' is missing" for fqn in missing)]
            problems += [f"'{fqn}' is not in the model" for fqn in extra]
        else:
            self._missing += missing
            self._extra += extra
        if problems:
            raise UnsupportedModelError(
                f"the checkpoint's {group} are not the model's: {_shown(problems, '; ')}",
                cure="Make the model as it was, or pass load_module_strict=False to leave out what only one of them has",
            )

    def tell(self, place: object) -> None:
        """Log what was let pass, in one line."""
        sides = {"not in the checkpoint, and as before": self._missing, "not in the model, and left out": self._extra}
        told = [f"{_shown([repr(each) for each in names], ', ')} ({how})" for how, names in sides.items() if names]
        if told:
            logger.warning("load_module_strict=False, '%s' is not all of this model: %s", place, "; ".join(told))


def _shown(words: Collection[str], between: str) -> str:
    num_others = len(words) - _MOST_SHOWN
    return between.join([*words][:_MOST_SHOWN]) + (f" and {num_others} more" if num_others > 0 else "")


__all__ = ["SameModel"]
