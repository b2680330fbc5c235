"""Loops that pack and unpack weights. Each runs on one thread, without the GIL.

[Note: unpacking in place] A unit's packed bytes are read into the end of the memory that its weights will fill, and
unpacked front to back, without other memory. From any record on, packed bytes are at most as many as the bytes of
their weights, so writing never overtakes reading (`PackedFormat.saves_memory`). Near the end, a record's output may
overlap the record itself: its codes are then copied first. ``gap`` is the number of bytes from the beginning of the
output to that of the packed bytes; `APART` if they share no memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from infinity.numerics.compiling import bits_of, float_of, inlined, kernel
from infinity.packed.blocks import FP8_TILE, INT8_FACTOR, LEVELS, NF4_BLOCK, NF4_RECORD_BYTES, THRESHOLDS

_RAW, _FLOATS, _NUMBER = types.uint8[::1], types.float32[::1], types.int64
_CODE, _THRESHOLDS = LEVELS.numpy(), THRESHOLDS.numpy()
_LEAST_SCALE = np.float32(1e-38)  # for a block of zeros: avoids 0 / 0
_LARGEST = np.float32(3.4028235e38)  # the largest finite fp32 number


@inlined
def _bf16(value: Any) -> Any:
    """The bits of a finite fp32 number as bf16, rounded to the nearest, ties to even."""
    u = np.uint32(bits_of(value))
    # 0x7FFF is just under half of the 16 bits that are cut off. At a tie, the last kept bit adds the 1 that rounds an
    # odd number up.
    return np.uint16((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inlined
def _fp16(value: Any) -> Any:
    """The bits of a finite fp32 number as fp16, rounded to the nearest, ties to even; infinite from 65,520 on."""
    u = np.uint32(bits_of(value))
    sign = np.uint32((u >> np.uint32(16)) & np.uint32(0x8000))
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    if a >= np.uint32(0x47800000):  # 65,536 and more
        return np.uint16(sign | np.uint32(0x7C00))
    # Below 2**-14. 0.5 has a last fraction bit of 2**-24, as fp16's subnormals have: adding 0.5 rounds to it in
    # hardware.
    if a < np.uint32(0x38800000):
        small = np.uint32(bits_of(float_of(np.int32(a)) + np.float32(0.5))) - np.uint32(0x3F000000)
        return np.uint16(sign | small)
    # 112 = 127 - 15, the difference of the exponents' biases. 13 bits of the fraction are cut off, rounded as in
    # `_bf16`.
    rounded = a - np.uint32(112 << 23) + np.uint32(0xFFF) + ((a >> np.uint32(13)) & np.uint32(1))
    return np.uint16(sign | (rounded >> np.uint32(13)))


def _rounded(value: Any, weights: Any) -> Any:
    """A product as an element of ``weights``: see `_UNPACKING`."""
    raise NotImplementedError  # numba takes the overload below


# For each type of weights. Lambdas, as numba compares annotations of parameters, too.
_ROUNDED: dict[Any, Any] = {
    types.float32: lambda value, weights: value,
    types.uint16: lambda value, weights: _bf16(value),
    types.int16: lambda value, weights: np.int16(_fp16(value)),
}
_options: Any = {"error_model": "numpy", "forceinline": True}
overload(_rounded, jit_options=_options)(lambda value, weights: _ROUNDED[weights.dtype])
# Of packed bytes, the scales among them (a view of the same memory), weights, elements of a row, and the gap. Weights are
# float32, or the bits of bf16 (uint16) or fp16 (int16): a loop for each.
_UNPACKING = [types.void(_RAW, _FLOATS, weight[::1], _NUMBER, _NUMBER) for weight in _ROUNDED]


@kernel(_NUMBER(_FLOATS, _RAW, _FLOATS))
def pack_nf4(values: Any, stored: Any, scales: Any) -> Any:
    """Write ``stored``, which ``scales`` views. Returns the index of the first value that is not finite, or -1."""
    numel = values.size
    for b in range((numel + NF4_BLOCK - 1) // NF4_BLOCK):
        o, p = b * NF4_BLOCK, b * NF4_RECORD_BYTES
        count = min(NF4_BLOCK, numel - o)
        m = np.float32(0)
        for i in range(count):
            magnitude = abs(values[o + i])
            # Also true for NaN, whose comparisons are all false.
            if not magnitude <= _LARGEST:
                return o + i
            m = max(m, magnitude)
        m = max(m, _LEAST_SCALE)
        # A record is 9 floats long: its scale is the first.
        scales[b * (NF4_RECORD_BYTES // 4)] = m
        inverse = np.float32(1) / m
        for i in range(NF4_BLOCK // 2):
            high, low = np.uint8(0), np.uint8(0)
            if 2 * i < count:  # bitsandbytes divides in a last block that is not full
                first = values[o + 2 * i] * inverse if count == NF4_BLOCK else values[o + 2 * i] / m
                for k in range(15):
                    high += np.uint8(first > _THRESHOLDS[k])
            if 2 * i + 1 < count:
                second = values[o + 2 * i + 1] * inverse if count == NF4_BLOCK else values[o + 2 * i + 1] / m
                for k in range(15):
                    low += np.uint8(second > _THRESHOLDS[k])
            # Two weights a byte, the first in the high half. The code is the number of thresholds below the weight.
            stored[p + 4 + i] = (high << np.uint8(4)) | low
    return -1


@kernel(*_UNPACKING)
def unpack_nf4(stored: Any, scales: Any, out: Any, row_numel: Any, gap: Any) -> None:
    """Write weights. Rows play no part: blocks go across them."""
    numel, half = out.size, NF4_BLOCK // 2
    table = np.empty(16, out.dtype)
    # A copy of a record's codes, for records that overlap their own output.
    local = np.empty(half, np.uint8)
    for b in range((numel + NF4_BLOCK - 1) // NF4_BLOCK):
        scale = scales[b * (NF4_RECORD_BYTES // 4)]
        for k in range(16):  # round 16 products instead of 64
            table[k] = _rounded(_CODE[k] * scale, out)
        o, p = b * NF4_BLOCK, b * NF4_RECORD_BYTES + 4
        count = min(NF4_BLOCK, numel - o)
        # The record's codes start at byte gap + p of the output, and its weights end at byte itemsize * (o + 64). Two
        # blocks of 2-byte weights in place: 256 bytes of output, 72 packed bytes from gap = 184 on. Block 0:
        # 184 + 4 >= 128, no overlap. Block 1: 184 + 40 < 256, so its codes are copied first.
        if count == NF4_BLOCK and gap + p >= out.itemsize * (o + NF4_BLOCK):
            for i in range(half):
                v = stored[p + i]
                out[o + 2 * i] = table[v >> np.uint8(4)]
                out[o + 2 * i + 1] = table[v & np.uint8(15)]
        else:
            for i in range(half):
                local[i] = stored[p + i]
            for i in range(count):
                v = local[i >> 1]
                out[o + i] = table[v & np.uint8(15) if i & 1 else v >> np.uint8(4)]


_ONE_127TH = np.float32(INT8_FACTOR)
_TO_EXPONENT = np.float32(2.0**120)  # 127 - 7: fp32's bias of exponents less e4m3's


@inlined
def _int8_value(code: Any, scale: Any) -> Any:
    return np.float32(np.int8(code)) * scale * _ONE_127TH


@inlined
def _fp8_value(code: Any, scale: Any) -> Any:
    # Exponent (4 bits) and fraction (3 bits), moved to their places in fp32, are a tiny number; a power of two makes up
    # for the other bias. Exact, subnormals included. 0x38 (1.0): 7 << 23 is 2**-120, times 2**120 is 1.
    v = np.int32(code)
    magnitude = float_of(np.int32((v & np.int32(0x7F)) << np.int32(20))) * _TO_EXPONENT
    return float_of(bits_of(magnitude) | np.int32((v & np.int32(0x80)) << np.int32(24))) * scale


@kernel(*_UNPACKING)
def unpack_int8(stored: Any, scales: Any, out: Any, row_numel: Any, gap: Any) -> None:
    """Write weights. A record is one row: its scale, a byte per weight, and zeros up to a multiple of 4."""
    record = 4 + (row_numel + 3) // 4 * 4
    local = np.empty(row_numel, np.uint8)
    for r in range(out.size // row_numel):
        scale = scales[r * record // 4]
        o, p = r * row_numel, r * record + 4
        codes, row = stored[p : p + row_numel], out[o : o + row_numel]  # slices: their loops have plain indices
        # Unless the row's codes begin where its output ends, or behind. See [Note: unpacking in place].
        if gap + p < out.itemsize * (o + row_numel):
            local[:] = codes
            codes = local
        for i in range(row.size):
            row[i] = _rounded(_int8_value(codes[i], scale), row)


@kernel(*_UNPACKING)
def unpack_fp8(stored: Any, scales: Any, out: Any, row_numel: Any, gap: Any) -> None:
    """Write weights. A record is 128 rows: padding, scales, codes."""
    across = (row_numel + FP8_TILE - 1) // FP8_TILE
    local, factors = np.empty(row_numel, np.uint8), np.empty(across, np.float32)
    p = 0
    for r in range(out.size // row_numel):
        if r % FP8_TILE == 0:
            p = (p + 3) // 4 * 4
            factors[:] = scales[p // 4 : p // 4 + across]
            p += 4 * across
        o = r * row_numel
        codes = stored[p : p + row_numel]
        # As in `unpack_int8`: codes that the row's own output would overwrite are copied first.
        if gap + p < out.itemsize * (o + row_numel):
            local[:] = codes
            codes = local
        for t in range(across):
            factor, first, last = factors[t], t * FP8_TILE, min((t + 1) * FP8_TILE, row_numel)
            tile, source = out[o + first : o + last], codes[first:last]
            for i in range(tile.size):
                tile[i] = _rounded(_fp8_value(source[i], factor), tile)
        p += row_numel


UNPACK = {"nf4": unpack_nf4, "int8": unpack_int8, "fp8_e4m3": unpack_fp8}
"""By the names of formats."""


@kernel(types.void(types.uint16[::1], _FLOATS))
def widen(stored: Any, out: Any) -> None:
    """Write fp32 from the bits of bf16."""
    # 64 weights are copied before they are widened: in place, the output may overlap its own input.
    local = np.empty(64, np.uint16)
    for b in range((out.size + 63) // 64):
        o = b * 64
        count = min(64, out.size - o)
        for i in range(count):
            local[i] = stored[o + i]
        for i in range(count):
            out[o + i] = float_of(np.int32(np.int32(local[i]) << np.int32(16)))
