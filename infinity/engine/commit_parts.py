"""What a commit of a durable run holds besides weights and states: the layout, scalars and buffers. Pure data."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infinity.engine.planned import Planned
from infinity.errors import ModelError, listed
from infinity.numerics.plain_data import pack
from infinity.optim.wrapped_optimizer import WrappedOptimizer
from infinity.units.buffers import module_buffers, write_buffer

_MOST_SHOWN = 4  # differences that an error lists
Buffer = torch.Tensor | str | None
"""A value; or the FQN of another buffer that is the same tensor."""


def check_layout(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Check that a commit is of this model and this optimizer.

    Raises:
        ModelError: it is not; the message lists the differences.
    """
    # `found` comes from JSON, which made lists of tuples. So `wanted` goes through JSON as well.
    old, new = found["parameters"], json.loads(json.dumps(wanted["parameters"]))
    problems = [f"'{fqn}' is missing in it" for fqn in new if fqn not in old]
    problems += [f"'{fqn}' is not in the model" for fqn in old if fqn not in new]
    had, has = found["buffers"], wanted["buffers"]
    # 0 stands for a missing buffer, because None is one that the module holds as None.
    problems += [f"buffer '{fqn}' is not the model's" for fqn in {**had, **has} if had.get(fqn, 0) != has.get(fqn, 0)]
    # In the order of the list that `layout_of` makes. The last one is only there for packed weights.
    words = ("unit", "shape", "strides", "dtype", "trainable", "states", "frozen_dtype")
    for fqn in new:
        if fqn in old and old[fqn] != new[fqn]:
            differing = itertools.zip_longest(words, old[fqn], new[fqn], fillvalue="none")
            problems += [f"'{fqn}' has {word} {was}, not {now}" for word, was, now in differing if was != now]
    for index, fqns in enumerate(wanted["groups"]):
        here = set(found["groups"][index]) if index < len(found["groups"]) else set()
        problems += [f"'{fqn}' is not in group {index} of its optimizer" for fqn in fqns if fqn not in here]
    # If parameters differ, these differ as a consequence, and would hide the cause.
    if not problems:
        for word, name in (("main weights and states are kept as", "records"), ("the optimizer is", "optimizer")):
            if found[name] != wanted[name]:
                problems.append(f"{word} {found[name]}, not {wanted[name]}")
    if problems:
        raise ModelError(
            f"the durable run in '{where}' belongs to another training: {listed(problems, '; ', _MOST_SHOWN)}",
            cure="Make model, optimizer and config as they were, or name another infinity.durable_path",
        )


def layout_of(plan: Planned, wrapped_optimizer: WrappedOptimizer, model: nn.Module) -> dict[str, Any]:
    """What must be the same to resume from a commit, as JSON: see `check_layout`."""
    form = plan.request.record_format
    parameters = {
        slot.spec.fqn: [
            unit.name,
            list(slot.spec.shape),
            list(slot.spec.stride),
            str(slot.spec.dtype),
            slot.spec.is_trainable,
            list(plan.names[unit.index]) if slot.spec.is_trainable else [],
            *([] if slot.spec.packed is None else [slot.spec.packed]),
        ]
        for unit in plan.units
        for slot in unit.layout.slots
    }
    return {
        "parameters": parameters,
        "records": [str(form.weight_dtype), form.main.value, form.states.value],
        "optimizer": wrapped_optimizer.name,
        "groups": [
            [wrapped_optimizer.fqn(parameter) for parameter in group["params"]]
            for group in wrapped_optimizer.param_groups
        ],
        "buffers": persistent_buffers_of(model),
    }


def packed(training_state: Mapping[str, Any]) -> bytes:
    """Scalars and small tensors as bytes.

    Raises:
        ModelError: something of it is no plain data.
    """
    try:
        return pack(dict(training_state), "the commit")
    except Exception as error:  # whatever the objects' classes raise
        raise ModelError(
            f"a durable run cannot keep the optimizer's groups, the scheduler or a module's extra state: {error}",
            cure="Let them hold numbers, texts, tensors, and lists and dicts of these, or set infinity.durable to false",
        ) from error


def buffers_of(model: nn.Module) -> dict[str, Buffer]:
    """Copies of all buffers, non-persistent ones and None included, by FQN."""
    found: dict[str, Buffer] = {}
    first: dict[int, str] = {}
    for fqn, _, _, buffer in module_buffers(model):
        if buffer is None:
            found[fqn] = None
        # One buffer under two names is stored once. The second name holds the first, so that both are one again.
        elif first.setdefault(id(buffer), fqn) != fqn:
            found[fqn] = first[id(buffer)]
        else:
            found[fqn] = buffer.detach().cpu().clone()
    return found


def set_buffers(model: nn.Module, values: Mapping[str, Buffer], device: torch.device) -> None:
    """Restore what `buffers_of` returned, also buffers that have been removed or have got another shape since.

    A persistent buffer that did not exist then is removed. A non-persistent one stays: modules compute it from others.
    """
    there = {}
    for fqn, module, name, _ in [*module_buffers(model)]:
        there[fqn] = module
        if fqn not in values and name not in module._non_persistent_buffers_set:
            del module._buffers[name]
    for fqn, value in values.items():
        prefix, _, name = fqn.rpartition(".")
        owner = there[fqn] if fqn in there else _module(model, prefix)
        buffer = owner._buffers.get(name)
        if isinstance(value, str):
            owner._buffers[name] = model.get_buffer(value)
        elif value is None or buffer is None or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
            owner._buffers[name] = None if value is None else value.to(device)
        else:
            write_buffer(buffer, value)


def _module(model: nn.Module, fqn: str) -> nn.Module:
    try:
        return model.get_submodule(fqn)
    except AttributeError as error:
        raise ModelError(
            f"the durable run has buffers of module '{fqn}', and the model has no such module",
            cure="Make the model as it was, or name another infinity.durable_path",
        ) from error


def persistent_buffers_of(model: nn.Module) -> dict[str, list[int] | None]:
    """Shapes of persistent buffers, by FQN; None for a buffer that is None."""
    return {
        fqn: None if buffer is None else list(buffer.shape)
        for fqn, module, name, buffer in module_buffers(model)
        if name not in module._non_persistent_buffers_set
    }
