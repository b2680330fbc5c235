"""Parameters of torch's tensor parallelism (`parallelize_module`): each process's part as a plain one, while an engine has it.

[Note: parts of DTensors] An engine pages ordinary memory. So a parameter that is a DTensor gives its place in the module to its
local tensor, under the same name, and the module gets a class of its own, of the same name, by which the attribute is a DTensor
of that again, made anew whenever somebody asks (as torch's parametrizations do it). Gradients come to the part by the backward
of `DTensor.from_local`, which brings them to the placements of the parameter: what all tensor ranks have whole gets the same
gradient on all of them. State dicts, exports and checkpoints of the model have the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from infinity.distributed.meshes import Mesh
from infinity.distributed.process_groups import num_processes
from infinity.errors import ModelError
from infinity.torch_internals.operations import with_parts

_ATTRIBUTE = "_infinity_parts_of"
_CURE = (
    'Make one mesh of all processes, init_device_mesh(..., mesh_dim_names=("dp", "tp")), pass mesh["tp"] to parallelize_module, '
    "and all of it as mesh_param to infinity.initialize"
)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is torch's ``DTensor``, which is imported by nobody else."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


@torch.no_grad()
def local_part(tensor: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The memory behind a DTensor, and what makes one like it of other memory. Neither is a part of a graph."""
    return tensor.to_local(), torch.no_grad()(_maker_of(tensor))


def _exchange(tensor: Any, local: torch.Tensor) -> None:
    """A DTensor gets other memory."""
    names = tensor.__tensor_flatten__()[0]
    setattr(tensor, next(name for name in names if isinstance(getattr(tensor, name), torch.Tensor)), local)


def mesh_of_parameters(model: nn.Module) -> SimpleNamespace | None:
    """The mesh that a model is divided over, where its DTensors leave no doubt: all of them have parts on all processes."""
    everyone = tuple(range(num_processes()))
    if {_members(whole) for _, _, whole in _places_of(model)} != {everyone}:
        return None
    # What `mesh_of` reads of a DeviceMesh.
    return SimpleNamespace(mesh=torch.tensor(everyone, dtype=torch.int64, device="cpu"), mesh_dim_names=("tp",))


def _members(parameter: Any) -> tuple[int, ...]:
    return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))


def _places_of(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Module, name and DTensor, unless FSDP has made them."""
    if any(each.__name__ == "FSDPModule" for module in model.modules() for each in type(module).__mro__):
        return []
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and is_dtensor(parameter)
    ]


class LocalParameters:
    """Takes the place of a model's DTensor parameters until `undo`."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        """
        Args:
            model: all of it.
            mesh: who has which part.

        Raises:
            ModelError: DTensors are divided otherwise than the mesh says. Nothing has changed.
        """
        self._places = _places_of(model)
        self._parts: dict[int, nn.Parameter] = {}
        """By id of the DTensor: a weight may be in several places."""
        self._restored: dict[int, nn.Parameter] = {}
        """By id of the part, from `undo` on: the DTensor, or another one where the part has got another dtype."""
        names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        for _, _, whole in self._places:
            _check(names[id(whole)], whole, mesh)
        for module, name, whole in self._places:
            if id(whole) not in self._parts:
                self._parts[id(whole)] = _part_of(whole)
            module._parameters[name] = self._parts[id(whole)]
        for module in self._modules():
            makers = {name: _maker_of(whole) for owner, name, whole in self._places if owner is module}
            module.__dict__[_ATTRIBUTE] = makers
            module.__class__ = _class_with(type(module), tuple(makers))  # type: ignore[arg-type]  # a class can be a key

    def _modules(self) -> Iterable[nn.Module]:
        return dict.fromkeys(module for module, _, _ in self._places)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._places)

    def of(self, parameters: Iterable[Any]) -> list[Any]:
        """Parameters, pairs of name and parameter, or groups of them, with parts in place of DTensors."""
        found: list[Any] = with_parts(parameters, lambda each: [self._parts.get(id(each), each)])
        return found

    def replace_in(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's groups hold parts from now on.

        Raises:
            ModelError: it has states of DTensors.
        """
        if any(id(parameter) in self._parts for parameter in optimizer.state):
            raise ModelError("the optimizer has states of DTensor parameters", cure="Pass one that has not stepped yet")
        for group in optimizer.param_groups:
            group["params"] = self.of(group["params"])

    def restore_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Its groups hold DTensors again."""
        for group in optimizer.param_groups:
            group["params"] = [self._restored.get(id(each), each) for each in group["params"]]

    def undo(self) -> None:
        """Modules have their DTensors again, of what the parts hold."""
        for module, name, whole in self._places:
            part = self._parts[id(whole)]
            if id(part) not in self._restored:
                if part.dtype == whole.dtype:
                    _exchange(whole, part.data)
                else:
                    whole = nn.Parameter(_maker_of(whole)(part.data), requires_grad=whole.requires_grad)
                self._restored[id(part)] = whole
            if module._parameters.get(name) is part:  # else the script has put another one there
                module._parameters[name] = self._restored[id(part)]
        for module in self._modules():
            if module.__dict__.pop(_ATTRIBUTE, None) is not None:
                module.__class__ = type(module).__base__  # type: ignore[assignment]


def _check(fqn: str, parameter: torch.Tensor, mesh: Mesh) -> None:
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    members = _members(parameter)
    if members != mesh.tensor.members and len(members) > 1:
        raise ModelError(
            f"parameter '{fqn}' is a DTensor of the ranks {list(members)}, and initialize was told that "
            f"{list(mesh.tensor.members)} share tensors",
            cure=_CURE,
            fqn=fqn,
        )
    if any(placement.is_partial() for placement in placements):
        raise ModelError(f"parameter '{fqn}' is a DTensor of partial sums", cure="Redistribute it first", fqn=fqn)


def _part_of(whole: Any) -> nn.Parameter:
    local = whole.to_local().detach()
    part = nn.Parameter(local, requires_grad=whole.requires_grad)
    _exchange(whole, local.new_empty(0))  # its memory is the engine's to release
    is_divided = any(placement.is_shard() for placement in whole.placements)
    vars(part)["tensor_model_parallel"] = is_divided  # as Megatron marks them
    vars(part)["is_part_of_dtensor"] = is_divided  # of which torch's optimizers would see the whole
    return part


def _maker_of(whole: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes DTensors like ``whole`` of their parts; keeps no memory of it."""
    form = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    kind = type(whole.detach())
    return functools.partial(kind.from_local, device_mesh=whole.device_mesh, placements=whole.placements, **form)


@functools.cache
def _class_with(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    # Instead of the parameter: the script sees a DTensor, made of the local part that the engine pages.
    def made(name: str) -> property:
        def get(module: nn.Module) -> Any:
            part = module._parameters[name]
            return None if part is None else module.__dict__[_ATTRIBUTE][name](part)

        return property(get)

    members: dict[str, Any] = {name: made(name) for name in names}
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), members)
