"""torch's undocumented functions, under names of ours, with what they are for.

Tried with torch 2.13. All are looked up when this module is imported, so a torch without one of them fails there, and
not during training."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
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

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context without ``__torch_function__``: operations see tensors of our classes as plain ones, and fetch nothing."""
no_override: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class without an override. A function in Python would cost each operation a
microsecond."""
backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs in this thread, -1 if none. By it a hook knows which backward has called it."""
backward_position: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number of the next node that autograd makes in this thread. Backward runs nodes from the highest number to the
lowest."""
is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` records this thread. It would store weights as constants."""
saving_hooks: Any = torch._C._autograd
"""Has the functions with ``saved_tensors_default_hooks``: the only way to see which hooks are active, torch's own
included."""
# Stacks of active modes, innermost last. A computation on another thread has to be given the same ones.
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
norms_of_each: Callable[..., Any] = torch._foreach_norm
"""The kernel of ``clip_grad_norm_`` on a GPU. Any other gives other last bits."""
copy_each: Callable[..., None] = torch._foreach_copy_
"""Copies each tensor of the second list into its place in the first: `copy_`, without Python in between."""
# Modules that write to their own buffers in forward.
BatchNorm = _BatchNorm
NormBase = _NormBase
SpectralParametrization = _SpectralNorm

__all__ = ["DeviceContext"]


DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in list(vars(torch).values())
    if isinstance(dtype, torch.dtype)
    and re.fullmatch(r"torch\.(bool|bfloat16|(u?int|float|complex)(8|16|32|64|128)(_e\w+)?)", str(dtype))
}
"""Dtypes by name, such as "float32": those whose elements are whole bytes, and not quantized."""
make_subclass: Callable[[type, torch.Tensor], Any] = torch.Tensor._make_subclass
"""Makes a tensor of that class over the memory of the given one."""
functional_call: Any = torch.nn.utils.stateless._functional_call
"""The implementation of ``torch.func.functional_call``. A frame of it on the stack means that a model has other
parameters for this call."""


class _Unrecorded:
    def __enter__(self) -> None:
        _record(False)

    def __exit__(self, *_: object) -> None:
        _record(True)


_record: Callable[[bool], None] = torch.autograd._enable_record_function  # type: ignore[attr-defined]
_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_unprofiled = _Unrecorded()  # one object for all uses: it has no state, and making one costs time
_nothing: Any = contextlib.nullcontext()


def unprofiled() -> Any:
    """A context in which a profiler of this thread records no operations. Not to be nested."""
    # A profiler of shapes asks each tensor for its address. For a placeholder it prints an error, and then records
    # wrong shapes for the next operations.
    return _unprofiled if _is_profiled() else _nothing


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward."""
    return backward_number() != -1


def is_autograds_thread() -> bool:
    """Whether the calling thread is one of autograd's own."""
    # They are made in C++, so `threading` has no Thread for them, or a dummy one if some code has asked for one.
    me = threading.get_ident()
    # A list: a generator that is cut off while it is closed would swallow an interrupt.
    mine = [each for each in threading.enumerate() if each.ident == me]
    return not mine or isinstance(mine[0], threading._DummyThread)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have ``callback`` called when the innermost running backward ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def num_owners(storage: torch.UntypedStorage) -> int:
    """References in C++ to a storage, that of the passed object included. With 2, one tensor alone uses the memory."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def version_of(tensor: torch.Tensor) -> int:
    """torch's count of in-place writes to a tensor; -1 for one made in inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


_C: Any = torch._C
_forbid_writes: Callable[[torch.Tensor], None] = _C._set_throw_on_mutable_data_ptr
# Only builds with CUDA have it.
_forbid_access: Callable[[int, str], None] | None = getattr(_C, "_set_storage_data_ptr_access_error_msg", None)


def forbid_access(tensor: torch.Tensor, message: str) -> None:
    """Let kernels that ask for the memory of ``tensor`` raise an error: in builds of torch without CUDA, only writing
    ones."""
    _forbid_writes(tensor)
    if _forbid_access is not None:
        _forbid_access(tensor.untyped_storage()._cdata, message)


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """The conjugate and the negative bit of a tensor: ``conj()`` sets a bit, and changes nothing in memory."""
    return tensor.is_conj(), tensor.is_neg()


def with_lazy_bits(tensor: torch.Tensor, bits: tuple[bool, bool]) -> torch.Tensor:
    """A view of ``tensor``, which has neither bit set, with these `lazy_bits`."""
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
"""The innermost transform of torch.func that runs in this thread, None if none does. Under one, tensors are wrapped, and
have no memory of their own."""
is_inference: Callable[[], bool] = torch.is_inference_mode_enabled
is_transformed: Callable[[torch.Tensor], bool] = _C._functorch.is_functorch_wrapped_tensor
"""Whether torch.func has wrapped the tensor. All five are C functions, so a check costs no call of Python."""


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Like ``torch.compiler.disable``: ``torch.compile`` breaks its graph at ``function``, and traces nothing in it."""
    # torch's own decorator imports the compiler, which takes a second and 70 MB, and most users never compile.
    tracer: Any = torch._C._dynamo.eval_frame
    skip = tracer._FrameAction.SKIP
    tracer.set_code_exec_strategy(function.__code__, tracer._FrameExecStrategy(skip, skip))
    marked: Any = function
    marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
    return function


def is_compiling() -> bool:
    """Whether the calling thread is inside torch's compiler, which reads all attributes of a tensor."""
    # Private, and the same from torch 2.6 to 2.13. ``torch.compiler.is_compiling`` is True in traced code only, and not
    # in the compiler's own.
    return torch._guards.CompileContext.try_get() is not None


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch's optimizers from importing the compiler, which takes two thirds of the time of ``infinity plan``.

    No other thread may import torch's compiler meanwhile. If it is imported already, nothing changes.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    marked: Any = torch.optim.Optimizer.add_param_group
    marked = getattr(marked, "__wrapped__", marked)
    # Stands for it, with the two functions that torch's optimizers call.
    stand_in = ModuleType(name)
    vars(stand_in).update(disable=lambda function, *_, **__: function, graph_break=lambda: None)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]
        # torch caches there the wrapper that `disable` returned. With the cached stand-in, a later compile would trace
        # into it.
        vars(marked).pop("__dynamo_disable", None)


def outside_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run ``function`` as if no mode and no transform of torch.func were active in its thread.

    If none is active, that costs half a microsecond.
    """
    # The engine's own operations must not be counted by a user's FlopCounterMode, faked by FakeTensorMode or wrapped by
    # vmap. Tensors made in inference mode have no version, so that mode is left too.

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        has_modes = num_dispatch_modes() or num_function_modes()
        has_transform, has_inference = transform() is not None, is_inference()
        if not (has_modes or has_transform or has_inference):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as outside:
            if has_inference:
                outside.enter_context(torch.inference_mode(False))
                outside.enter_context(torch.no_grad())  # leaving inference mode switches gradients on
            if has_modes:
                outside.enter_context(_C._DisableTorchDispatch())
                outside.enter_context(_C.DisableTorchFunction())
            if has_transform:
                outside.enter_context(pyfunctorch.temporarily_clear_interpreter_stack())
            return function(*args, **kwargs)

    return call


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own. Wrapped tensors (torch.func) and zero tangents (forward mode) have
    none."""
    return not (is_transformed(tensor) or tensor._is_zerotensor())


# ----------------------------------------------------------------------------------------- which GPU is a process's own


def set_default_gpu(number: int) -> None:
    """Make GPU ``number`` the current one, unless the script has chosen one already."""
    # Each process on a machine uses its own GPU. Current 0 is torch's default, so it counts as not chosen.
    if torch.cuda.is_available() and torch.cuda.current_device() == 0 < number < torch.cuda.device_count():
        torch.cuda.set_device(number)


# --------------------------------------------- what the default process group was made with. Known in torch 2.4 to 2.13


def default_store(distributed: Any) -> Any:
    """The key-value store through which the ranks of the default group met; None if this torch names it otherwise."""
    read = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if read is None else read()


def group_timeout(distributed: Any) -> timedelta | None:
    """The timeout of the default group, if the script has set one; None if it has not, or if torch does not say."""
    # CPU backends are asked first: gloo always has the script's value. nccl's default differs from gloo's, so a group
    # with exactly that timeout is one for which the script has set none.
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

# Functions in ``torch.distributed.nn.functional`` have ``group=group.WORLD`` as a default argument, which Python
# evaluates at import. If that happens after a group was made (an optimizer imports it by way of ``torch._dynamo``),
# they keep that group alive, also after ``destroy_process_group``.


def forget_default_groups() -> None:
    """Set these defaults to None: such a call uses the group that is the default one at that time."""
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
    """Compile the kernel ``name`` of ``source`` for this GPU, with so many threads per block; None if that fails."""
    try:
        with torch.cuda.device(device):
            kernel: Any = torch.cuda._compile_kernel(source, name)  # type: ignore[no-untyped-call,unused-ignore]
    except Exception as error:
        logger.info("the GPU kernel '%s' cannot be compiled, torch's own operations run: %s", name, error)
        return None

    def launch(blocks: int, arguments: Sequence[Any]) -> None:
        kernel(grid=(blocks, 1, 1), block=(threads, 1, 1), args=list(arguments))

    return launch
