"""Groups of an optimizer that were saved with the names of their parameters, brought into the order of another one.

What torch saves of an optimizer goes by the order of its parameters alone; a checkpoint that another framework wrote has
another order, leaves frozen parameters out, and knows hyperparameters that ours does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def in_order_of(
    mine: Sequence[Mapping[str, Any]], rest: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """``param_groups`` and ``states`` of a checkpoint as the optimizer whose groups are ``mine`` would have saved them.

    Hyperparameters that only one of both has stay as the optimizer has them.

    Raises:
        ValueError: parameters are in other groups.
    """
    names: Mapping[Any, str] = rest["names"]
    saved = rest["param_groups"]
    if len(saved) != len(mine):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} groups, and this one {len(mine)}: pass model_parameters to "
            "infinity.initialize as in that run, or load_optimizer_states=False"
        )
    fqn_of = {id(parameter): fqn for fqn, parameter in parameters.items()}
    group_of = {names[key]: index for index, group in enumerate(saved) for key in group["params"]}
    ids: dict[str, int] = {}
    groups = []
    number = 0
    for index, (old, own) in enumerate(zip(saved, mine, strict=True)):
        members = []
        for parameter in own["params"]:
            fqn = fqn_of.get(id(parameter))
            if fqn is not None:
                ids[fqn] = number
                _check(fqn, group_of.get(fqn, index), index)
            members.append(number)
            number += 1
        known = {name: value for name, value in old.items() if name in own}
        groups.append({**own, **known, "params": members})
    for fqn, index in group_of.items():
        if fqn in parameters and fqn not in ids:
            _check(fqn, index, None)
    states = [[ids[fqn], fqn, scalars] for _, fqn, scalars in rest["states"] if fqn in ids]
    return {**rest, "param_groups": groups, "states": states}


def _check(fqn: str, saved: int, mine: int | None) -> None:
    if saved != mine:
        where = "none" if mine is None else str(mine)
        raise ValueError(
            f"'{fqn}' is in group {saved} of the checkpoint's optimizer, and in {where} of this one: pass model_parameters "
            "to infinity.initialize as in that run, or load_optimizer_states=False"
        )


__all__ = ["in_order_of"]
