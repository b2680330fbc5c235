"""Casts and moves a model's buffers when an engine takes the model.

[Note: dtypes of buffers] A buffer keeps its dtype, as in DeepSpeed. Rotary frequencies, running statistics, counters
and codebooks become useless when they are rounded to 16 bits. There are three exceptions:
  1. The config sets ``data_types.buffer_dtype``.
  2. torch needs the weights' dtype: statistics of a BatchNorm with weights, and vectors of a spectral norm.
  3. The buffer has a dtype of the parameters, and that dtype is at most as wide as the compute dtype, or all parameters
     are fp64. Such a buffer is cast with the parameters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from infinity.numerics.raw_bytes import raw_bytes
from infinity.torch_internals.names import BatchNorm, SpectralParametrization
from infinity.torch_internals.operations import leaves

# Parts of torch's messages for operands whose dtypes differ. They vary by kernel, and a message that no pattern matches
# only gets no hint. F.embedding's message contains "scalar type" too, so `_OF_INDICES` has to be tried first.
_OF_DTYPES = re.compile(r"dtype|scalar type|datatype|Type promoting|type \(.*should be the same")
_OF_INDICES = re.compile(r"argument #1 'indices' to have one of the following scalar types")
ModuleBuffer = tuple[str, nn.Module, str, torch.Tensor | None]
"""FQN, module, name in it, value."""


def module_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[ModuleBuffer]:
    """All buffers, None included; ``remove_duplicate``: a shared module is listed under one name only."""
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, buffer in module._buffers.items():
            yield f"{prefix}.{name}" if prefix else name, module, name, buffer


def persistent_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """FQN and value of each buffer in a state dict."""
    for fqn, module, name, buffer in module_buffers(model, remove_duplicate=remove_duplicate):
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield fqn, buffer


def restore_buffers(buffers: Sequence[ModuleBuffer]) -> None:
    """Put the buffers of `module_buffers` back into their modules."""
    for _, module, name, buffer in buffers:
        module._buffers[name] = buffer


def write_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` into a buffer of the same shape, also into an expanded one.

    Raises:
        RuntimeError: elements of the buffer share memory, and ``value`` differs between them.
    """
    with torch.no_grad():
        # torch refuses an in-place write to an expanded tensor. For zeros(1).expand(4), with stride (0,), `once` is
        # (slice(1),): the one element that exists. If all four new values have the same bits, writing that element is
        # enough. Bits are compared, as NaN does not equal NaN. If the values differ, copy_ below raises torch's own
        # error.
        once = tuple(slice(1 if step == 0 else None) for step in buffer.stride())
        if buffer[once].shape != buffer.shape and raw_bytes(value[once].expand_as(value)).equal(raw_bytes(value)):
            buffer, value = buffer[once], value[once]
        buffer.copy_(value)


class BufferCast:
    """Chooses the dtype of each buffer: see [Note: dtypes of buffers]."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, buffer_dtype: torch.dtype | None) -> None:
        """``buffer_dtype``: the config's dtype for all floating-point buffers; None: the rules of the note apply."""
        self._model = model
        self._compute_dtype = compute_dtype
        self._buffer_dtype = buffer_dtype
        # Read now, before the engine takes the parameters: from then on they all have the compute dtype.
        came = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        self._cast_dtypes = {
            dtype
            for dtype in came
            if dtype.itemsize <= compute_dtype.itemsize or (dtype == torch.float64 and len(came) == 1)
        }

    def apply(self, device: torch.device) -> None:
        """Cast the buffers that need it, and move all of them to ``device``."""
        for _, module, name, buffer in module_buffers(self._model):
            if buffer is not None:
                module._buffers[name] = buffer.to(device=device, dtype=self._dtype_for(module, buffer))

    def _dtype_for(self, module: nn.Module, buffer: torch.Tensor) -> torch.dtype:
        if not buffer.is_floating_point():
            return buffer.dtype
        if self._buffer_dtype is not None:
            return self._buffer_dtype
        # torch's batch norm kernels refuse statistics of another dtype than the weight's. Spectral norm multiplies its
        # vectors u and v by the weight: the parametrization keeps them in itself, the older hook in the module that it
        # is registered on.
        meets_weights = isinstance(module, BatchNorm) and module.weight is not None
        meets_weights |= isinstance(module, SpectralParametrization)
        meets_weights |= any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
        return self._compute_dtype if meets_weights or buffer.dtype in self._cast_dtypes else buffer.dtype

    def explain_failures(self) -> RemovableHandle:
        """Register a hook that adds a hint to errors about mixed dtypes. Returns its handle."""
        hook = _Explanation(self._compute_dtype)
        # With always_call, torch runs the hook in the `except` clause of a forward that raises.
        return self._model.register_forward_hook(hook, always_call=True, with_kwargs=True)


class _Explanation:
    """A forward hook that adds a note to the exception of a failing forward."""

    def __init__(self, compute_dtype: torch.dtype | None) -> None:
        self._compute_dtype = compute_dtype

    def __reduce__(self) -> tuple[Any, ...]:
        # A deep copy or pickle of the model has the hook too, but no engine: without a compute dtype the hook does
        # nothing.
        return _Explanation, (None,)

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        error = sys.exception()
        if self._compute_dtype is None or not isinstance(error, RuntimeError | ValueError):
            return
        if _OF_INDICES.search(str(error)):
            error.add_note("An embedding takes whole numbers: pass the ids as torch.int64")
        elif _OF_DTYPES.search(str(error)):
            error.add_note(self._words(model, (args, kwargs), self._compute_dtype))

    def _words(self, model: nn.Module, inputs: Any, weights: torch.dtype) -> str:
        name, sentences = _name_of(weights), []
        given = sorted({_name_of(each.dtype) for each in leaves(inputs) if _differs(each, weights)})
        if given:
            block = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(weights)
            more = "" if block is None else f", or set config key '{block}.auto_cast' to true"
            sentences.append(f"The model was called with {', '.join(given)}: cast it (x.to(torch.{name})){more}.")
        kept = [(fqn, _name_of(buffer.dtype)) for fqn, buffer in model.named_buffers() if _differs(buffer, weights)]
        if kept:
            (fqn, dtype), *others = kept
            more = f" and {len(others)} more" if others else ""
            sentences.append(
                f"Buffers keep their dtype, and '{fqn}'{more} is {dtype}: if it meets weights here, cast it in forward, or set "
                f"config key 'data_types.buffer_dtype' to \"{name}\"."
            )
        if not sentences:
            sentences.append(
                f"What forward makes with another dtype cannot meet them: make it with dtype=torch.{name}, or set config key "
                "'torch_autocast.enabled' to true."
            )
        return " ".join([f"Weights are {name}.", *sentences])


def _differs(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
