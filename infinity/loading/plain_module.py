"""Loads weights into a module that is not of transformers, without copying tensors that fit as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from infinity.errors import ModelError
from infinity.loading.outcome import Outcome


def load_module(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Outcome:
    """Give parameters and buffers these values, cast to their dtypes, with their own strides.

    A tied parameter may be in the files under any one of its names. ``_load_from_state_dict`` of modules and extra
    states are not used.

    Raises:
        ModelError: a non-persistent buffer is on the meta device, so its values are unknown.
    """
    places = _places(model)
    wanted: dict[str, torch.Tensor] = {name: values[last] for name, (values, last, _) in places.items()}
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
    """Address of a storage of the files -> id of the parameter or buffer that has it."""
    for name, value in wanted.items():
        if name in tensors and name not in unfit:
            loaded.add(id(value))
            # torch.save keeps aliases: two names may share one storage. Only the first becomes a parameter without a
            # copy, or training one would change the other.
            is_free = owners.setdefault(tensors[name].untyped_storage().data_ptr(), id(value)) == id(value)
            is_buffer = places[name][2]
            if is_buffer and not value.is_meta:
                with torch.no_grad():
                    value.copy_(tensors[name])  # in place, as load_state_dict: others may view it
                continue
            new = _fitted(value, tensors[name], is_free=is_free)
            if not value.is_meta:
                value.data = new  # it stays the same object
            elif is_buffer:
                made[id(value)] = new
            elif id(value) not in made:
                made[id(value)] = nn.Parameter(new, requires_grad=value.requires_grad)
    for name, value in wanted.items():
        # A tensor on meta is replaced by a new object, under all of its names.
        if id(value) in made:
            values, last, _ = places[name]
            values[last] = made[id(value)]
    _refuse_unknown_buffers(model)
    missing = sorted(name for name, value in wanted.items() if name not in unfit and id(value) not in loaded)
    return Outcome(missing, sorted(tensors.keys() - wanted.keys()), mismatched, sorted(odd))


def _places(model: nn.Module) -> dict[str, tuple[dict[str, Any], str, bool]]:
    """Name -> the module's dict with the tensor, its key there, and whether it is a buffer."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kinds: Any = (module._parameters, False), (module._buffers, True)
        for values, is_buffer in kinds:
            for last, value in values.items():
                if value is not None and not (is_buffer and last in module._non_persistent_buffers_set):
                    found[f"{prefix}.{last}" if prefix else last] = values, last, is_buffer
    return found


def _loses_values(new: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a cast loses more than rounding does: between integers and floats, or of imaginary parts."""
    if new.is_complex() or value.is_complex():
        return not (value.is_complex() and (new.is_complex() or new.is_floating_point()))
    return new.is_floating_point() != value.is_floating_point()


def _fitted(value: torch.Tensor, found: torch.Tensor, *, is_free: bool) -> torch.Tensor:
    """``found`` with dtype and strides of ``value``. ``is_free``: no other tensor uses the memory of ``found``."""
    new = found.to(value.dtype)
    # The strides that a copy of the parameter would have. The file has C order.
    wanted = torch.empty_like(value, device="meta")
    if new.stride() != wanted.stride() or (new is found and not is_free):
        new = torch.empty_like(wanted, device="cpu").copy_(new)
    return new


def _refuse_unknown_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        module, _, last = name.rpartition(".")
        if buffer.is_meta and last in model.get_submodule(module)._non_persistent_buffers_set:
            problem = f"buffer '{name}' is on the meta device and in no state dict, so it has no values"
            cure = "Make the module's buffers with values (accelerate.init_empty_weights(include_buffers=False))"
            raise ModelError(problem, cure=cure, fqn=name)
