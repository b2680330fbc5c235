"""Names that torch does not document, under names of ours, with what they are for and what there would be without them.

Tried with torch 2.13. All are looked up when this module is imported: a torch that lacks one says so there, and not in the
midst of a training."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch import pyfunctorch
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


# ---------------------------------------------- modes: keeps the engine's own operations out of what watches the user's

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Private, and the same from torch 2.6 to 2.13: the public ways to leave a mode need the mode itself.
num_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = _C._len_torch_function_stack
transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
"""The innermost transform of torch.func that runs in this thread, None if none does."""
is_inference: Callable[[], bool] = torch.is_inference_mode_enabled
is_transformed: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
"""Whether the tensor is one around another, made by torch.func. The five are functions in C: asking them is no call of Python."""


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compile`` neither traces ``function`` nor what it calls, and cuts its graph there.

    As ``torch.compiler.disable``, without importing the compiler: that takes a second and 70 MB, and most never compile.
    """
    tracer: Any = torch._C._dynamo.eval_frame
    skip = tracer._FrameAction.SKIP
    tracer.set_code_exec_strategy(function.__code__, tracer._FrameExecStrategy(skip, skip))
    marked: Any = function
    marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
    return function


def is_compiling() -> bool:
    """Whether the calling thread is inside torch's compiler, which looks at all that a tensor has.

    Private, and the same from torch 2.6 to 2.13: ``torch.compiler.is_compiling`` answers to what is compiled.
    """
    return torch._guards.CompileContext.try_get() is not None


class _NoCompiler(ModuleType):
    """What torch's optimizers ask of the compiler, where nothing is compiled."""

    @staticmethod
    def disable(function: Callable[_P, _R], *_: Any, **__: Any) -> Callable[_P, _R]:
        return function

    @staticmethod
    def graph_break() -> None:
        """There is no graph."""


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """torch's optimizers are made and make steps without importing the compiler, which takes two thirds of a forecast's time.

    For commands that do nothing else: no other thread may import it meanwhile. Where it is imported already, nothing changes.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    marked: Any = torch.optim.Optimizer.add_param_group
    marked = getattr(marked, "__wrapped__", marked)
    sys.modules[name] = _NoCompiler(name)
    try:
        yield
    finally:
        del sys.modules[name]
        vars(marked).pop("__dynamo_disable", None)  # torch keeps there what `disable` gave it


def outside_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` runs as if no mode, and no transform of torch.func, were active in its thread.

    Where none is, that costs half a microsecond. In inference mode, tensors are made that do not count writes: what it makes
    are ordinary ones.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        has_modes, has_transform, has_inference = (
            num_dispatch_modes() or num_function_modes(),
            transform() is not None,
            is_inference(),
        )
        if not (has_modes or has_transform or has_inference):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as outside:
            if has_inference:
                outside.enter_context(torch.inference_mode(False))
                outside.enter_context(torch.no_grad())
            if has_modes:
                outside.enter_context(_C._DisableTorchDispatch())
                outside.enter_context(_C.DisableTorchFunction())
            if has_transform:
                outside.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
            return function(*args, **kwargs)

    return call


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own. One around another (torch.func) and a zero tangent (forward mode) have not."""
    return not (is_transformed(tensor) or tensor._is_zerotensor())


# ----------------------------------------------------------------------------------------- which GPU is a process's own


def set_default_gpu(number: int) -> None:
    """Make that GPU the current one, unless a script has chosen one, or there are not as many: each process has its own."""
    if torch.cuda.is_available() and torch.cuda.current_device() == 0 < number < torch.cuda.device_count():
        torch.cuda.set_device(number)


# --------------------------------------------- what the default process group was made with. Known in torch 2.4 to 2.13


def default_store(distributed: Any) -> Any:
    """The store in which its ranks have found each other, of the module ``torch.distributed``.

    None where torch has it under another name, and nothing can be told to others.
    """
    read = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if read is None else read()


def group_timeout(distributed: Any) -> timedelta | None:
    """How long its ranks wait for each other, as the script has said; None where it has not, or where torch does not tell.

    A group of nccl's own timeout, which is shorter than that of other groups, is one of which nothing was said.
    """
    group = distributed.group.WORLD
    for device in sorted(getattr(group, "_device_types", ()), key=lambda device: device.type != "cpu"):
        try:
            found: timedelta = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
        of_nccl = getattr(distributed.distributed_c10d, "default_pg_nccl_timeout", None)
        return None if device.type != "cpu" and found == of_nccl else found
    return None


# --------------------------------------------------------------- process groups that torch's functions have as defaults

# ``torch.distributed.nn.functional`` has ``group=group.WORLD``; whoever imports it after the group was made (an optimizer does,
# by way of ``torch._dynamo``) keeps that group.


def forget_default_groups() -> None:
    """These functions take the group that is the default one when they are called. Nothing where torch has none of them."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        if inspect.isfunction(function) and function.__defaults__:
            function.__defaults__ = tuple(
                None if type(value).__name__ == "ProcessGroup" else value for value in function.__defaults__
            )


# --------------------------------------------------------------------- kernels in CUDA C, compiled when they are wanted

# `torch.cuda._compile_kernel` has been there since torch 2.9 (run with 2.11, read in 2.13). Where it is missing or
# fails, there is no kernel, and torch's own operations run.

logger = logging.getLogger(__name__)

Launch = Callable[[int, Sequence[Any]], None]
"""`(blocks, arguments)`: runs a kernel on the current stream. Arguments are tensors and integers of 32 bits."""


def compiled_for(device: torch.device, source: str, name: str, threads: int) -> Launch | None:
    """The kernel for this GPU, with so many threads per block; None if it cannot be had."""
    try:
        with torch.cuda.device(device):
            kernel: Any = torch.cuda._compile_kernel(source, name)  # type: ignore[no-untyped-call,unused-ignore]
    except Exception as error:
        logger.info("the GPU kernel '%s' cannot be compiled, torch's own operations run: %s", name, error)
        return None

    def launch(blocks: int, arguments: Sequence[Any]) -> None:
        kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=list(arguments))

    return launch
