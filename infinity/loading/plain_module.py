"""Weights for a module that is not transformers': its own names, its own shapes.

Knows `nn.Module` and what ``load_state_dict`` means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.loading.outcome import Outcome


def load_module(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Outcome:
    """Let parameters and buffers have these values, cast to their dtypes, in memory of their own and with their own strides.

    A tied parameter needs to be there under one of its names only. Modules' own ways to load (``_load_from_state_dict``,
    extra states) are not used.

    Raises:
        ModelError: a buffer on the meta device is not in the files, and nobody knows its values.
    """
    places = _places(model)
    wanted = {name: _value(module, last) for name, (module, last) in places.items()}
    mismatched = sorted(
        (name, tuple(tensors[name].shape), tuple(value.shape))
        for name, value in wanted.items()
        if name in tensors and tensors[name].shape != value.shape
    )
    odd = [
        (name, str(tensors[name].dtype).removeprefix("torch."))
        for name, value in wanted.items()
        if name in tensors and _loses_values(tensors[name], value)
    ]
    unfit = {name for name, *_ in (*mismatched, *odd)}
    made: dict[int, torch.Tensor] = {}
    loaded: set[int] = set()
    owners: dict[int, int] = {}
    """Where memory of the files begins -> whose value it is."""
    for name, value in wanted.items():
        if name in tensors and name not in unfit:
            loaded.add(id(value))
            is_free = owners.setdefault(tensors[name].untyped_storage().data_ptr(), id(value)) == id(value)
            _set(*places[name], value, tensors[name], made, is_free=is_free)
    for name, value in wanted.items():  # the other names of tied ones
        if id(value) in made:
            module, last = places[name]
            values: dict[str, Any] = module._buffers if last in module._buffers else module._parameters
            values[last] = made[id(value)]
    _refuse_unknown_buffers(model)
    missing = sorted(name for name, value in wanted.items() if name not in unfit and id(value) not in loaded)
    return Outcome(missing, sorted(tensors.keys() - wanted.keys()), mismatched, sorted(odd))


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        buffers = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for last in (*module._parameters, *buffers):
            if (module._parameters | module._buffers)[last] is not None:
                found[f"{prefix}.{last}" if prefix else last] = module, last
    return found


def _value(module: nn.Module, last: str) -> torch.Tensor:
    value = module._parameters.get(last)
    return value if value is not None else module._buffers[last]  # type: ignore[return-value]


def _loses_values(new: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a cast from one to the other is more than rounding: between integers and others, and of imaginary parts."""
    if new.is_complex() or value.is_complex():
        return not (value.is_complex() and (new.is_complex() or new.is_floating_point()))
    return new.is_floating_point() != value.is_floating_point()


def _set(
    module: nn.Module,
    last: str,
    value: torch.Tensor,
    found: torch.Tensor,
    made: dict[int, torch.Tensor],
    *,
    is_free: bool,
) -> None:
    """What had a value stays the same object, under all its names. ``is_free``: no other value has the memory of ``found``."""
    if not value.is_meta and last in module._buffers:
        with torch.no_grad():
            value.copy_(found)  # what else looks at its memory sees it, as after load_state_dict
        return
    new = found.to(value.dtype)
    wanted = torch.empty_like(value, device="meta")
    if new.stride() != wanted.stride() or (new is found and not is_free):
        new = torch.empty_like(wanted, device="cpu").copy_(new)
    if not value.is_meta:
        value.data = new
    elif last in module._buffers:
        module._buffers[last] = made[id(value)] = new
    elif id(value) not in made:
        module._parameters[last] = made[id(value)] = nn.Parameter(new, requires_grad=value.requires_grad)


def _refuse_unknown_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        module, _, last = name.rpartition(".")
        if buffer.is_meta and last in model.get_submodule(module)._non_persistent_buffers_set:
            raise ModelError(
                f"buffer '{name}' is on the meta device and in no state dict, so nobody knows its values",
                cure="Make the module's buffers with values (accelerate.init_empty_weights(include_buffers=False))",
                fqn=name,
            )
