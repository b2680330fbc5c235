"""Names that torch does not document, under names of ours, with what they are for and what there would be without them.

Tried with torch 2.13. All are looked up when this module is imported: a torch that lacks one says so there, and not in the
midst of a training.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

as_plain = torch._C.DisableTorchFunctionSubclass
"""A context in which tensors of our classes are tensors like any other: else looking at one asks its engine."""
no_override: Any = torch._C._disabled_torch_function_impl
"""As a class's ``__torch_function__``: it has none. A function in Python in its place costs each operation a microsecond."""
backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Which backward runs in this thread, -1 if none: else a hook could not tell where it is called from."""
backward_position: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""How many nodes autograd has made in this thread: it runs them in the reverse order."""
is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` watches: it would make constants of weights."""
saving_hooks: Any = torch._C._autograd
"""Its functions with ``saved_tensors_default_hooks``: the only way to see those that are active, torch's own included."""
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
"""What watches or changes the operations of this thread, innermost last: another thread has to be given the same."""
norms_of_each: Callable[..., Any] = torch._foreach_norm
"""The kernel of ``clip_grad_norm_`` on a GPU: any other gives other last bits."""
BatchNorm = _BatchNorm
NormBase = _NormBase
SpectralParametrization = _SpectralNorm
"""Modules that write to their own buffers."""

__all__ = ["DeviceContext"]


functional_call: Any = torch.nn.utils.stateless._functional_call
"""What ``torch.func.functional_call`` runs in: a frame of it says that a model has other parameters for a moment."""


class _Unrecorded:
    def __enter__(self) -> None:
        _record(False)

    def __exit__(self, *_: object) -> None:
        _record(True)


_record: Callable[[bool], None] = torch.autograd._enable_record_function  # type: ignore[attr-defined]
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_unrecorded = _Unrecorded()
_nothing: Any = contextlib.nullcontext()


def unrecorded() -> Any:
    """A context in which a profiler of this thread sees no operations: it would ask tensors without memory for their address,
    print an error for each, and tell the next operations' shapes wrongly. Not to be nested."""
    return _unrecorded if _is_profiled() else _nothing


def has_transforms() -> bool:
    """Whether a transform of torch.func runs in this thread: tensors are then wrapped, and have no memory of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward."""
    return backward_number() != -1


def is_autograds_thread() -> bool:
    """Whether the calling thread is one of autograd's own: Python has made none of them, and knows them by no name."""
    me = threading.get_ident()
    thread = next((thread for thread in threading.enumerate() if thread.ident == me), None)
    return thread is None or isinstance(thread, threading._DummyThread)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the innermost running backward ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def make_subclass(kind: type, tensor: torch.Tensor) -> Any:
    """A tensor of that class over the memory of ``tensor``."""
    return torch.Tensor._make_subclass(kind, tensor)


def num_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors, and others in C++, share a storage, the object that is passed included: memory with one owner besides
    can be taken over, or exchanged."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def version_of(tensor: torch.Tensor) -> int:
    """torch's count of writes to a tensor; -1 for one of inference mode, where nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


_C: Any = torch._C
_forbid_writes: Callable[[torch.Tensor], None] = _C._set_throw_on_mutable_data_ptr
_forbid_access: Callable[[int, str], None] | None = getattr(_C, "_set_storage_data_ptr_access_error_msg", None)


def forbid_access(tensor: torch.Tensor, message: str) -> None:
    """Kernels that ask for the memory of ``tensor`` get an error. Builds of torch without CUDA only know one for kernels that
    may write; others read there what it holds."""
    _forbid_writes(tensor)
    if _forbid_access is not None:
        _forbid_access(tensor.untyped_storage()._cdata, message)


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether what lies in a tensor's memory is read as conjugated, and as negated: ``conj()`` of a complex one writes nothing
    there."""
    return tensor.is_conj(), tensor.is_neg()


def with_lazy_bits(tensor: torch.Tensor, bits: tuple[bool, bool]) -> torch.Tensor:
    """A view of ``tensor``, which has none, that reads its memory as `lazy_bits` says of another."""
    is_conj, is_neg = bits
    tensor = tensor.conj() if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor
