"""Loops over memory for which torch has no single operation, compiled by numba at their first use.

Every kernel runs on one thread and releases the GIL. One core moves as many bytes per second as these loops need, and
two threads must not enter numba's own thread pool at a time.

[Note: bits as in torch] `adam` performs the operations of torch's fused Adam on the CPU, in their order, with a fused
multiply-add exactly where torch's vector code has one. So its results are torch's, bit for bit;
`infinity.optim.fused_adam` verifies that on this machine before it is used. Torch treats the last elements of a tensor,
fewer than a vector, by other code: the caller leaves those to torch.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # untyped
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

Kernel = Callable[..., None]

NUM_SUMS = 8
"""Sums of `add_squares`: fp32 elements of an AVX2 register."""


class Kernels(NamedTuple):
    """Compiled functions over 1-D arrays without gaps. bf16 values are given as int16, their bits.

    Attributes:
        join: `(weight: int16, remainder: int16, main: float32)`: writes ``main``.
        split: `(main: float32, weight: int16, remainder: int16)`: writes ``weight`` and ``remainder``.
        adam: `(rows: int64, values: float32)`: one step of Adam or AdamW on each of the slices that a table lists. See `_adam`.
        add_squares: `(values: int16, sums: float32)`: adds the square of value i to sum i modulo `NUM_SUMS`. A multiple of
            so many values.
    """

    join: Kernel
    split: Kernel
    adam: Kernel
    add_squares: Kernel


def can_compile() -> bool:
    """Whether numba compiles at all: ``NUMBA_DISABLE_JIT`` is there for debugging."""
    return not getattr(numba.config, "DISABLE_JIT", False)


@functools.cache
def kernels() -> Kernels:
    """The kernels, compiled for this processor, or read from numba's cache.

    The cache is where numba finds room: ``NUMBA_CACHE_DIR`` if set, beside this file, or in the user's cache directory.
    If none can be written, each process compiles for itself.
    """
    # Signatures are given, so that numba compiles here and not in the first call. `::1`: no gaps, so loops become
    # vector code.
    words16, floats = types.int16[::1], types.float32[::1]
    return Kernels(
        join=compiled(_join, [types.void(words16, words16, floats)]),
        split=compiled(_split, [types.void(floats, words16, words16)]),
        adam=compiled(_adam, [types.void(types.int64[:, ::1], types.float32[:, ::1])]),
        add_squares=compiled(_add_squares, [types.void(words16, floats)]),
    )


def compiled(function: Callable[..., None], signatures: list[Any]) -> Kernel:
    """The function, compiled for these signatures: see `kernels`."""
    # Without the GIL, so that update workers run side by side. A division by zero gives an infinity, as in torch.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        kernel: Kernel = numba.njit(signatures, cache=True, **options)(function)
    except Exception as error:  # no directory, a full disk, a broken file: none of it may stop a training
        logger.debug("compiling %s without a cache: %s", function.__name__, error)
        kernel = numba.njit(signatures, **options)(function)
    return kernel


# Operations that numba lacks, as LLVM instructions. The first two reinterpret bits: no conversion, no memory access.
def _bits_of(typing: Any, value: Any) -> Any:
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], context.get_value_type(types.int32)
    )


def _float_of(typing: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], context.get_value_type(types.float32)
    )


def _multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    signature = types.float32(types.float32, types.float32, types.float32)
    # One rounding for a * b + c. numba never contracts a product and a sum by itself (that needs fastmath).
    return signature, lambda context, builder, signature, args: builder.fma(*args)


def _widened(typing: Any, value: Any) -> Any:
    """A gradient as float32: from float32, or from the bits of a bf16. Chosen by type, when a loop is compiled."""
    if value == types.float32:
        return types.float32(types.float32), lambda context, builder, signature, args: args[0]

    def from_half(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # A bf16 is the upper half of a float32.
        wide = builder.zext(args[0], context.get_value_type(types.int32))
        bits = builder.shl(wide, context.get_constant(types.int32, 16))
        return builder.bitcast(bits, context.get_value_type(types.float32))

    return types.float32(types.int16), from_half


bits_of: Any = intrinsic(_bits_of)
float_of: Any = intrinsic(_float_of)
multiply_add: Any = intrinsic(_multiply_add)
widened: Any = intrinsic(_widened)

# Constants are int32: with Python's int numba would compute in 64 bits, in half as many elements per register.
_SIXTEEN = np.int32(16)
_HALF = np.int32(0x8000)  # half of the last place of a bf16: added before the shift, it rounds to nearest
_NAN = np.int32(0x7FC00000)


def _join(weight: Any, remainder: Any, main: Any) -> None:
    for i in range(main.size):
        main[i] = float_of(np.int32((np.int32(weight[i]) << _SIXTEEN) + np.int32(remainder[i])))


def _split(main: Any, weight: Any, remainder: Any) -> None:
    for i in range(main.size):
        value = main[i]
        bits = bits_of(value)
        if value != value:  # the bits of some would become those of a number
            bits = _NAN
        high = np.int32(np.int32(bits + _HALF) >> _SIXTEEN)
        weight[i] = np.int16(high)
        remainder[i] = np.int16(bits - np.int32(high << _SIXTEEN))


def _pointer(typing: Any, address: Any) -> Any:
    return types.voidptr(types.int64), lambda context, builder, signature, args: builder.inttoptr(
        args[0], context.get_value_type(types.voidptr)
    )


pointer: Any = intrinsic(_pointer)


# Inlined into each caller, so that every combination of dtypes has a loop of its own without a branch.
_force: Any = {"nogil": True, "error_model": "numpy", "forceinline": True}


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _stepped(main: Any, gradient: Any, average: Any, square: Any, v: Any) -> Any:
    """Main weight and moments of one element after a step. ``v``: the numbers, see `_adam`."""
    # As in ATen/native/cpu/FusedAdamKernel.cpp: each line rounds as the one there, so none may be merged or simplified.
    gradient = gradient * v[0]
    # Not a multiplication by 0: an infinite weight would give NaN.
    if v[2] != np.float32(0.0):
        gradient = multiply_add(main, v[2], gradient)
    main = main * v[1]
    # torch.lerp: from the average if its weight is below 0.5, else from the gradient, with weight - 1.
    base = average if v[4] != np.float32(0.0) else gradient
    average = multiply_add(v[3], gradient - average, base)
    square = multiply_add(v[6] * gradient, gradient, square * v[5])
    root = np.float32(math.sqrt(square)) / v[7] + v[8]
    return main + (v[9] * average) / root, average, square


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _step_split(weight: Any, remainder: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any, v: Any) -> None:
    # Model weight and remainder are joined, updated and split in registers: the fp32 weight is never in memory.
    for i in range(weight.size):
        main = float_of(np.int32((np.int32(weight[i]) << _SIXTEEN) + np.int32(remainder[i])))
        main, exp_avg[i], exp_avg_sq[i] = _stepped(main, widened(gradient[i]), exp_avg[i], exp_avg_sq[i], v)
        bits = bits_of(main)
        if main != main:
            bits = _NAN
        high = np.int32(np.int32(bits + _HALF) >> _SIXTEEN)
        weight[i] = np.int16(high)
        remainder[i] = np.int16(bits - np.int32(high << _SIXTEEN))


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _step_whole(weight: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any, v: Any) -> None:
    for i in range(weight.size):
        weight[i], exp_avg[i], exp_avg_sq[i] = _stepped(weight[i], widened(gradient[i]), exp_avg[i], exp_avg_sq[i], v)


def _adam(rows: Any, values: Any) -> None:
    """One step of each of ``rows`` (int64), with the numbers of that row of ``values`` (float32, 10 columns) which it names.

    The columns of a row are:
        0: address of the fp32 main weights, or of the bf16 model weights where main weights are split (bf16 weight and 16-bit
        remainder).
        1: address of the remainders; 0 where main weights are fp32.
        2, 3: address of the gradient; 1 if it is bf16, 0 if it is fp32.
        4, 5: addresses of the moments.
        6: number of elements.
        7: the row of the numbers.
    The numbers are:
        0: every gradient is multiplied with it.
        1: the weight is multiplied with it first: 1 - lr * weight_decay in AdamW, 1 in Adam.
        2: this times the weight is added to the gradient: weight_decay in Adam, 0 in AdamW.
        3: weight of the interpolation: 1 - beta1, or -beta1 if that is smaller.
        4: 1 if 3 is 1 - beta1, else 0.
        5, 6: the weights of the old second moment and of the gradient's square.
        7: square root of 1 - beta2 ** step.
        8: added to the root of the second moment.
        9: -lr / (1 - beta1 ** step).
    """
    # Addresses in place of arrays: so one call takes all slices of a chunk, often hundreds. The caller holds the
    # tensors.
    for i in range(rows.shape[0]):
        numel, v = rows[i, 6], values[rows[i, 7]]
        average = carray(pointer(rows[i, 4]), numel, np.float32)
        square = carray(pointer(rows[i, 5]), numel, np.float32)
        if rows[i, 1] != 0:
            weight = carray(pointer(rows[i, 0]), numel, np.int16)
            remainder = carray(pointer(rows[i, 1]), numel, np.int16)
            if rows[i, 3] != 0:
                half = carray(pointer(rows[i, 2]), numel, np.int16)
                _step_split(weight, remainder, half, average, square, v)
            else:
                gradient = carray(pointer(rows[i, 2]), numel, np.float32)
                _step_split(weight, remainder, gradient, average, square, v)
        else:
            main = carray(pointer(rows[i, 0]), numel, np.float32)
            if rows[i, 3] != 0:
                half = carray(pointer(rows[i, 2]), numel, np.int16)
                _step_whole(main, half, average, square, v)
            else:
                gradient = carray(pointer(rows[i, 2]), numel, np.float32)
                _step_whole(main, gradient, average, square, v)


def _add_squares(values: Any, sums: Any) -> None:
    for start in range(0, values.size, NUM_SUMS):
        # NUM_SUMS independent sums, which the compiler keeps in one register.
        for i in range(NUM_SUMS):
            value = widened(values[start + i])
            sums[i] += value * value
