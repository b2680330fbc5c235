"""Checks types and ranges of a checkpoint's or commit's training state, before anything is changed by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from infinity.numerics.random_states import check_random_states

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
# Keys of training.json and their types. Only the first two are required: `import-deepspeed` writes no random states.
_KINDS = {
    **{"client_state": dict, "counters": dict, "param_groups": list, "states": list, "others": dict, "names": dict},
    **{"random": dict, "ranks": list, "extra_states": dict},
}


def check_training_state(found: Any) -> None:
    """Check that a checkpoint's values have the types that the rest of the package expects.

    Raises:
        ValueError, TypeError, LookupError: one does not.
    """
    for name, kind in _KINDS.items():
        if name not in found and name in ("client_state", "counters"):
            raise ValueError(f"there is no '{name}'")
        if name in found and not isinstance(found[name], kind):
            raise TypeError(f"'{name}' is a {type(found[name]).__name__}")
    check_counters(found["counters"])
    for group in found.get("param_groups", ()):
        if not all(type(key) is int for key in group["params"]):
            raise TypeError("'param_groups' hold something else than numbers of parameters")
    # A state: number of the parameter in the groups, its FQN, and its states that are not per element.
    for key, fqn, scalars in found.get("states", ()):
        if (type(key), type(fqn)) != (int, str) or not isinstance(scalars, dict):
            raise TypeError("'states' hold something else than states")
    for name, kinds in (("names", (int, str)), ("others", (int, dict))):
        if not all(
            isinstance(key, kinds[0]) and isinstance(each, kinds[1]) for key, each in found.get(name, {}).items()
        ):
            raise TypeError(f"'{name}' hold something else than they should")
    for each in (found, *found.get("ranks", ())):
        if "random" in each:
            check_random_states(each["random"])


def check_counters(counters: Mapping[str, Any]) -> None:
    """Check that counters are numbers in range. Raises as `check_training_state` does."""
    scale = counters["loss_scale"]
    # `type` and not isinstance: True is an int, too. Steps are added to these counts, which must stay in 64 bits.
    if not all(type(counters[name]) is int and 0 <= counters[name] < 1 << 62 for name in _COUNTERS):
        raise ValueError("'counters' hold something else than counts")
    numbers = [scale[name] for name in ("scale", "dynamic", "patience", "num_finite")]
    numbers.append(scale.get("num_steps", 0))  # which DeepSpeed's checkpoints lack
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
        raise ValueError("'loss_scale' holds something else than numbers")


def check_groups(saved: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> None:
    """Check that saved hyperparameters have the types of those of an optimizer's groups.

    Raises:
        ValueError: one has another type, or the numbers of groups differ.
    """
    if len(saved) != len(now):
        raise ValueError(f"it has {len(saved)} parameter groups, and the optimizer {len(now)}")
    for index, (before, present) in enumerate(zip(saved, now, strict=True)):
        for name in before:
            if name in present and name != "params" and not _are_alike(before[name], present[name]):
                here = f"{before[name]!r:.80}, where the optimizer has {present[name]!r:.80}"
                raise ValueError(f"in group {index}, '{name}' is {here}")


def _are_alike(one: Any, other: Any) -> bool:
    # None stands for a default in torch's optimizers (`foreach`, `fused`), so it may take the place of any type.
    if one is None or other is None:
        return True
    if isinstance(other, tuple | list):
        return isinstance(one, tuple | list) and len(one) == len(other) and all(map(_are_alike, one, other))
    # A learning rate may be a float, or a tensor of one element (`capturable`).
    if _is_number(other):
        return _is_number(one)
    return isinstance(one, type(other)) or isinstance(other, type(one))


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_states(states: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check the states of parameters in a commit of a durable run.

    Args:
        states: FQN -> scalars, names of the element-wise states, number of updates, and whether there was no update.
        names: of all element-wise states.

    Raises:
        ValueError, TypeError: one has another form.
    """
    for fqn, (scalars, own_names, num_updates, is_fresh) in states.items():
        are_named = own_names is None or (isinstance(own_names, tuple | list) and {*own_names} <= {*names})
        are_numbers = isinstance(scalars, dict) and all(_is_number(each) for each in scalars.values())
        if not are_named or not are_numbers or type(num_updates) is not int or is_fresh is not (own_names is None):
            raise ValueError(f"the state of '{fqn}' is none")
