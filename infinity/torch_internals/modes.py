"""Keeps the engine's own operations out of what watches the user's: torch.compile, and modes (selective checkpointing, FLOP
counters, a default device).

Knows torch's stacks of modes; must not know what is done outside of them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch import pyfunctorch

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Private, and the same from torch 2.6 to 2.13: the public ways to leave a mode need the mode itself.
_C: Any = torch._C
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
