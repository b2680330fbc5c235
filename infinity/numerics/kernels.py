"""Loops over memory for which torch has no single operation. See `infinity.numerics.compiling`.

Every kernel runs on one thread and releases the GIL. One core moves as many bytes per second as these loops need, and
two threads must not enter numba's own thread pool at a time.

[Note: bits as in torch] `adam` performs the operations of torch's fused Adam on the CPU, in their order, with a fused
multiply-add exactly where torch's vector code has one. So its results are torch's, bit for bit;
`infinity.optim.fused_adam` verifies that on this machine before it is used. Torch treats the last elements of a tensor,
fewer than a vector, by other code: the caller leaves those to torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # untyped

from infinity.numerics.compiling import bits_of, float_of, inlined, kernel, multiply_add, pointer, widened

NUM_SUMS = 8
"""Sums of `add_squares`: fp32 elements of an AVX2 register."""

_WORDS16, _FLOATS = types.int16[::1], types.float32[::1]
# Constants are int32: with Python's int numba would compute in 64 bits, in half as many elements per register.
_SIXTEEN = np.int32(16)
_HALF = np.int32(0x8000)  # half of the last place of a bf16: added before the shift, it rounds to nearest
_NAN = np.int32(0x7FC00000)


@inlined
def _joined(weight: Any, remainder: Any) -> Any:
    return float_of(np.int32((np.int32(weight) << _SIXTEEN) + np.int32(remainder)))


@inlined
def _halves(main: Any) -> Any:
    """Model weight and remainder of a main weight: see `infinity.numerics.remainder`."""
    bits = bits_of(main)
    if main != main:  # the bits of some would become those of a number
        bits = _NAN
    high = np.int32(np.int32(bits + _HALF) >> _SIXTEEN)
    return np.int16(high), np.int16(bits - np.int32(high << _SIXTEEN))


@kernel(types.void(_WORDS16, _WORDS16, _FLOATS))
def join(weight: Any, remainder: Any, main: Any) -> None:
    """Write fp32 main weights from the bits of bf16 model weights and the remainders."""
    for i in range(main.size):
        main[i] = _joined(weight[i], remainder[i])


@kernel(types.void(_FLOATS, _WORDS16, _WORDS16))
def split(main: Any, weight: Any, remainder: Any) -> None:
    """Write the bits of bf16 model weights and the remainders from fp32 main weights."""
    for i in range(main.size):
        weight[i], remainder[i] = _halves(main[i])


@inlined
def _stepped(main: Any, gradient: Any, average: Any, square: Any, v: Any) -> Any:
    """Main weight and moments of one element after a step. ``v``: the numbers, see `adam`."""
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


@inlined
def _step_split(weight: Any, remainder: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any, v: Any) -> None:
    # Model weight and remainder are joined, updated and split in registers: the fp32 weight is never in memory.
    for i in range(weight.size):
        main = _joined(weight[i], remainder[i])
        main, exp_avg[i], exp_avg_sq[i] = _stepped(main, widened(gradient[i]), exp_avg[i], exp_avg_sq[i], v)
        weight[i], remainder[i] = _halves(main)


@inlined
def _step_whole(weight: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any, v: Any) -> None:
    for i in range(weight.size):
        weight[i], exp_avg[i], exp_avg_sq[i] = _stepped(weight[i], widened(gradient[i]), exp_avg[i], exp_avg_sq[i], v)


@inlined
def _step(row: Any, gradient: Any, v: Any) -> None:
    numel = row[6]
    average, square = carray(pointer(row[4]), numel, np.float32), carray(pointer(row[5]), numel, np.float32)
    if row[1] != 0:
        weight, remainder = carray(pointer(row[0]), numel, np.int16), carray(pointer(row[1]), numel, np.int16)
        _step_split(weight, remainder, gradient, average, square, v)
    else:
        _step_whole(carray(pointer(row[0]), numel, np.float32), gradient, average, square, v)


@kernel(types.void(types.int64[:, ::1], types.float32[:, ::1]))
def adam(rows: Any, values: Any) -> None:
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
        row, numel, v = rows[i], rows[i, 6], values[rows[i, 7]]
        if row[3] != 0:
            _step(row, carray(pointer(row[2]), numel, np.int16), v)
        else:
            _step(row, carray(pointer(row[2]), numel, np.float32), v)


@kernel(types.void(_WORDS16, _FLOATS))
def add_squares(values: Any, sums: Any) -> None:
    """Add the square of value i (the bits of a bf16) to sum i modulo `NUM_SUMS`; a multiple of so many values."""
    for start in range(0, values.size, NUM_SUMS):
        # NUM_SUMS independent sums, which the compiler keeps in one register.
        for i in range(NUM_SUMS):
            value = widened(values[start + i])
            sums[i] += value * value
