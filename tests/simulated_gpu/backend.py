"""Tensors of a device ``sim``, whose memory is host memory, under torch's own dispatcher and autograd.

torch leaves one dispatch key to devices it does not know. Kernels for it are registered here as one fallback, which runs the
CPU's kernel on an alias of the same memory. To everything above the kernels a tensor is then on another device: a branch for
host memory cannot be taken by accident, mixing it with a CPU tensor is an error, and autograd runs backward in a thread of
that device, as it does for CUDA.

Two things torch does not let it do: an error in backward ends the process, and a parameter cannot move between it and the CPU
by ``parameter.data = ...``, so models are made on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

NAME = "sim"

_DLPACK_CPU = 1
_DLPACK_OTHER = 12  # kDLExtDev, which torch takes for its device of no name
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]

_TAKES_BOTH = ("_copy_from", "_copy_from_and_resize", "index", "index_put", "_index_put_impl", "set_")
"""Kernels that take tensors of the CPU beside those of a GPU, as CUDA's do."""

_MOVED = ("_copy_from", "_copy_from_and_resize")

_libraries: list[torch.library.Library] = []
"""Registrations last as long as these."""


class NoSimulation(Exception):
    """There can be no simulated GPU here; the message says why."""


Watcher = Callable[[str, list[torch.Tensor], list[torch.Tensor]], None]
"""What is told of every kernel: its name, the device tensors that it read, those that it wrote."""

_watchers: list[Watcher] = []
_synchronisations: list[Callable[[str], None]] = []


def watch(kernels: Watcher, synchronisations: Callable[[str], None]) -> Callable[[], None]:
    """Tell ``kernels`` of each kernel before it runs, and ``synchronisations`` of what makes the host wait. Returns the end."""
    _watchers.append(kernels)
    _synchronisations.append(synchronisations)

    def end() -> None:
        _watchers.remove(kernels)
        _synchronisations.remove(synchronisations)

    return end


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a CPU tensor as a tensor of the device; it keeps that memory alive."""
    return _relabelled(tensor, _DLPACK_OTHER)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the device as a CPU tensor; it keeps that memory alive."""
    return _relabelled(tensor, _DLPACK_CPU)


def _relabelled(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(tensor)
    address = _pointer_of(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = kind  # DLTensor.device behind DLTensor.data
    ctypes.c_int32.from_address(address + 12).value = 0
    return torch._C._from_dlpack(capsule)


class _Module:
    """What ``torch.cuda`` is to CUDA, as far as torch asks. There is one device, and random numbers are the CPU's."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        pass

    def device(self, index: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def register() -> None:
    """Make the device known to torch, once in a process.

    Raises:
        NoSimulation: this torch cannot have a device that is written in Python.
    """
    if _libraries:
        return
    from torch.utils import backend_registration

    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise NoSimulation(f"torch {torch.__version__} has no devices written in Python (2.10 has)")
    setup(NAME, backend_module=_Module())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    _libraries.append(fallback)


def register_or_skip() -> None:
    """For a module of tests, which is skipped where there can be no such device.

    As it is collected, before any test runs: the first backward makes the threads of all devices that there are.
    """
    import pytest

    try:
        register()
    except NoSimulation as missing:
        pytest.skip(str(missing), allow_module_level=True)


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The CPU's kernel on the same memory."""
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    given, shape = tree_flatten((args, kwargs))
    tensors = [value for value in given if isinstance(value, torch.Tensor) and value.device.type == NAME]
    strangers = [
        value for value in given if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.ndim > 0
    ]
    if strangers and tensors and name.rstrip("_") not in _TAKES_BOTH and name not in _TAKES_BOTH:
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, found {NAME} and cpu")
    is_view = any(info.alias_info is not None and not info.alias_info.is_write for info in schema.returns)
    if is_view:
        return _view(operator, args[0], args[1:], kwargs)
    _tell(name, schema, args, kwargs, tensors)
    hosts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not isinstance(value, torch.Tensor) or value.device.type != NAME:
            return value
        if id(value) not in hosts:
            # An empty one may be there to be resized for a result, which borrowed memory cannot be.
            hosts[id(value)] = value, on_host(value) if value.numel() else torch.empty_like(value, device="cpu")
        return hosts[id(value)][1]

    host_args, host_kwargs = tree_unflatten([to_host(value) for value in given], shape)
    if name in _MOVED:
        return _copied(*args, **kwargs)
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = None
    # A number that stands for a tensor arrives as a number: the operator's other overloads take it.
    has_numbers = any(
        isinstance(value, bool | int | float | complex) and str(argument.type) == "Tensor"
        for argument, value in _named(schema, args, kwargs)
    )
    result = (operator.overloadpacket if has_numbers else operator)(*host_args, **host_kwargs)
    for value, host in hosts.values():
        if host.shape != value.shape:
            value.data = on_device(host)
    return _to_device(result, schema, args, kwargs, hosts)


def _view(operator: Any, base: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view: its geometry from a tensor without memory, for the base may have none that could be looked at."""
    numel = base.storage_offset() + sum((n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True)) + 1
    geometry = torch.empty(max(numel, 1), dtype=base.dtype, device="meta")
    seen = operator(geometry.as_strided(base.shape, base.stride(), base.storage_offset()), *args, **kwargs)

    def view(one: torch.Tensor) -> torch.Tensor:
        if one.dtype != base.dtype:
            raise NotImplementedError(f"{operator}: a view of another dtype")
        alias = torch.ops.aten.alias.default(base)
        return alias.as_strided_(one.shape, one.stride(), one.storage_offset())

    return view(seen) if isinstance(seen, torch.Tensor) else [view(one) for one in seen]


def _copied(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to = on_host(target) if target.device.type == NAME else target
    to.copy_(on_host(source) if source.device.type == NAME else source)
    return target


def _to_device(
    result: Any, schema: Any, args: Any, kwargs: Any, hosts: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> Any:
    returns = schema.returns
    if not returns:
        return None
    if len(returns) != 1:
        results = result if isinstance(result, tuple) else ()
        return tuple(
            _one_to_device(one, info, schema, args, kwargs, hosts) for one, info in zip(results, returns, strict=True)
        )
    return _one_to_device(result, returns[0], schema, args, kwargs, hosts)


def _one_to_device(
    result: Any, info: Any, schema: Any, args: Any, kwargs: Any, hosts: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> Any:
    if info.alias_info is not None and info.alias_info.is_write:
        return next(
            value
            for argument, value in _named(schema, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.before_set == info.alias_info.before_set
        )
    if isinstance(result, list | tuple):
        return type(result)(_one_to_device(one, info, schema, args, kwargs, hosts) for one in result)
    if not isinstance(result, torch.Tensor):
        return result
    for original, host in hosts.values():  # what returns its argument, if there is nothing to do
        if result is host:
            return original
    return on_device(result)


def _named(schema: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    positional = itertools.chain(args, itertools.repeat(None))
    for argument in schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]
        elif not argument.kwarg_only:
            yield argument, next(positional)


def _tell(name: str, schema: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
    if not _watchers:
        return
    written: list[torch.Tensor] = []
    for argument, value in _named(schema, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]
    if name in _MOVED:
        source, target = args[:2]
        written = [target] if target.device.type == NAME else []
        tensors = [source] if source.device.type == NAME else []
        if target.device != source.device and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            _tell_synchronisation("copy_")
    if name == "_local_scalar_dense":
        _tell_synchronisation("item")
    read = [tensor for tensor in tensors if all(tensor is not one for one in written)]
    for watcher in list(_watchers):
        watcher(name, read, written)


def _tell_synchronisation(name: str) -> None:
    for told in list(_synchronisations):
        told(f"{name} in {threading.current_thread().name}")
