"""Groups of an optimizer that were saved with the names of their parameters, brought into the order of another one.

What torch saves of an optimizer goes by the order of its parameters alone. A model that was made in another way may have
another one, and so has a checkpoint that another framework wrote, which leaves frozen parameters out and has other
hyperparameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from infinity.optim.groups import EXPERTS


def in_order_of(
    mine: Sequence[Mapping[str, Any]],
    training_state: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    *,
    is_strict: bool,
) -> dict[str, Any]:
    """Groups and states of a checkpoint as the optimizer whose groups are ``mine`` would have saved them.

    Of another framework's, hyperparameters that only one of both has stay as the optimizer has them.

    Args:
        mine: of parameters that are all in the model.
        training_state: what a checkpoint holds besides large tensors; with ``names``.
        parameters: of the model, by name.
        is_strict: whether a parameter that only one of both optimizers has is an error; otherwise it starts anew, or its states
            are left out.

    Raises:
        ValueError: parameters are in other groups.
    """
    is_ours = "random" in training_state  # another framework has saved none
    names: Mapping[Any, str] = training_state["names"]
    saved = training_state["param_groups"]
    if len(saved) != len(mine):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} groups, and this one {len(mine)}: pass model_parameters to "
            "infinity.initialize as in that run, or load_optimizer_states=False"
        )
    fqn_of = {id(parameter): fqn for fqn, parameter in parameters.items()}
    # Experts may be paged as one tensor or each by itself; states of one kind do not fit the other.
    saved_alone, alone = (any(f"{EXPERTS}." in fqn for fqn in fqns) for fqns in (names.values(), parameters))
    if saved_alone != alone:
        there, here = (
            "for each expert" if own else "for all experts of a layer together" for own in (saved_alone, alone)
        )
        raise ValueError(
            f"the checkpoint's optimizer has states {there}, and this one {here}: pass load_optimizer_states=False, or set "
            "infinity.experts as in that run"
        )
    # By name, because the saved order of parameters may be another one than this model's.
    group_of = {names[key]: index for index, group in enumerate(saved) for key in group["params"]}
    ids: dict[str, int] = {}
    groups = []
    for index, (old, own) in enumerate(zip(saved, mine, strict=True)):
        members = []
        for parameter in own["params"]:
            fqn = fqn_of[id(parameter)]
            _check(fqn, group_of.get(fqn, None if is_ours and is_strict else index), index)
            ids[fqn] = len(ids)
            members.append(ids[fqn])
        # Of another framework only hyperparameters that both have: its others would not be understood.
        values = old if is_ours else {**own, **{name: value for name, value in old.items() if name in own}}
        groups.append({**values, "params": members})
    # A saved parameter that this optimizer has in no group: with strict loading its state would be lost.
    for fqn, saved_index in group_of.items():
        if is_strict and fqn in parameters and fqn not in ids:
            _check(fqn, saved_index, None)
    states = [[ids[fqn], fqn, scalars] for _, fqn, scalars in training_state["states"] if fqn in ids]
    others = {ids[names[key]]: entry for key, entry in training_state["others"].items() if names[key] in ids}
    return {**training_state, "param_groups": groups, "states": states, "others": others}


def _check(fqn: str, saved: int | None, mine: int | None) -> None:
    if saved != mine:
        there, here = ("none" if index is None else f"group {index}" for index in (saved, mine))
        otherwise = (
            ", load_module_strict=False to begin its states anew or leave them out," if None in (saved, mine) else ","
        )
        raise ValueError(
            f"'{fqn}' is in {there} of the checkpoint's optimizer, and in {here} of this one: pass model_parameters to "
            f"infinity.initialize as in that run{otherwise} or load_optimizer_states=False"
        )
