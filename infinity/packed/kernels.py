"""Loops that pack and unpack weights, compiled by numba at their first use. Each runs on one thread, without the GIL.

[Note: unpacking in place] A unit's packed bytes are read into the end of the memory that its weights will fill, and
unpacked front to back, without other memory. From any record on, packed bytes are at most as many as the bytes of
their weights, so writing never overtakes reading (`PackedFormat.saves_memory`). Near the end, a record's output may
overlap the record itself: its codes are then copied first. ``gap`` is the number of bytes from the beginning of the
output to that of the packed bytes; `APART` if they share no memory.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from infinity.numerics.kernels import Kernel, bits_of, compiled, float_of
from infinity.packed.blocks import FP8_TILE, KIND_BF16, NF4_BLOCK, NF4_RECORD_BYTES


class PackedKernels(NamedTuple):
    """Compiled functions over 1-D arrays without gaps. Weights of two bytes are given as their bits, uint16.

    Attributes:
        pack_nf4: `(values: float32, thresholds: float32, stored: uint8, scales: float32)`: writes ``stored``, which
            ``scales`` views. Returns the index of the first value that is not finite, or -1.
        nf4_to_16bit: `(stored: uint8, scales: float32, code: float32, out: uint16, pairs: uint32, gap, kind)`: writes
            ``out``, which ``pairs`` views.
        nf4_to_floats: `(stored, scales, code, out: float32, gap)`.
        int8_to_16bit, int8_to_floats: `(stored: uint8, scales: float32, out, row_numel, gap[, kind])`.
        fp8_to_16bit, fp8_to_floats: `(stored: uint8, scales: float32, out, row_numel, gap[, kind])`.
        widen: `(stored: uint16, out: float32, gap)`: bf16 to fp32.
    """

    pack_nf4: Any
    nf4_to_16bit: Kernel
    nf4_to_floats: Kernel
    int8_to_16bit: Kernel
    int8_to_floats: Kernel
    fp8_to_16bit: Kernel
    fp8_to_floats: Kernel
    widen: Kernel


@functools.cache
def kernels() -> PackedKernels:
    """The kernels, compiled for this processor, or read from numba's cache."""
    raw, floats, words16, pairs = types.uint8[::1], types.float32[::1], types.uint16[::1], types.uint32[::1]
    number = types.int64
    of_rows = types.void(raw, floats, words16, number, number, number), types.void(raw, floats, floats, number, number)
    return PackedKernels(
        pack_nf4=compiled(_pack_nf4, [number(floats, floats, raw, floats)]),
        nf4_to_16bit=compiled(_nf4_to_16bit, [types.void(raw, floats, floats, words16, pairs, number, number)]),
        nf4_to_floats=compiled(_nf4_to_floats, [types.void(raw, floats, floats, floats, number)]),
        int8_to_16bit=compiled(_int8_to_16bit, [of_rows[0]]),
        int8_to_floats=compiled(_int8_to_floats, [of_rows[1]]),
        fp8_to_16bit=compiled(_fp8_to_16bit, [of_rows[0]]),
        fp8_to_floats=compiled(_fp8_to_floats, [of_rows[1]]),
        widen=compiled(_widen, [types.void(words16, floats, number)]),
    )


_force: Any = {"nogil": True, "error_model": "numpy", "forceinline": True}
_LEAST_SCALE = np.float32(1e-38)  # for a block of zeros: avoids 0 / 0
_LARGEST = np.float32(3.4028235e38)  # the largest finite fp32 number


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _bf16(value: Any) -> Any:
    """The bits of a finite fp32 number as bf16, rounded to the nearest, ties to even."""
    u = np.uint32(bits_of(value))
    # 0x7FFF is just under half of the 16 bits that are cut off. At a tie, the last kept bit adds the 1 that rounds an
    # odd number up.
    return np.uint16((u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@numba.njit(**_force)  # type: ignore[untyped-decorator]
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


def _pack_nf4(values: Any, thresholds: Any, stored: Any, scales: Any) -> Any:
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
                    high += np.uint8(first > thresholds[k])
            if 2 * i + 1 < count:
                second = values[o + 2 * i + 1] * inverse if count == NF4_BLOCK else values[o + 2 * i + 1] / m
                for k in range(15):
                    low += np.uint8(second > thresholds[k])
            # Two weights a byte, the first in the high half. The code is the number of thresholds below the weight.
            stored[p + 4 + i] = (high << np.uint8(4)) | low
    return -1


def _nf4_to_16bit(stored: Any, scales: Any, code: Any, out: Any, pairs: Any, gap: Any, kind: Any) -> None:
    numel = out.size
    half = NF4_BLOCK // 2
    table = np.empty(16, np.uint32)
    # A copy of a record's codes, for records that overlap their own output.
    local = np.empty(NF4_BLOCK // 2, np.uint8)
    for b in range((numel + NF4_BLOCK - 1) // NF4_BLOCK):
        scale = scales[b * (NF4_RECORD_BYTES // 4)]
        for k in range(16):  # round 16 products instead of 64
            product = code[k] * scale
            table[k] = np.uint32(_bf16(product) if kind == KIND_BF16 else _fp16(product))
        o, p = b * half, b * NF4_RECORD_BYTES + 4
        count = min(NF4_BLOCK, numel - b * NF4_BLOCK)
        # The record's codes start at byte gap + p of the output, and its weights end at byte 4 * (o + half). o counts
        # pairs of 2-byte weights. Two blocks in place: 256 bytes of output, 72 packed bytes from gap = 184 on. Block 0:
        # 184 + 4 >= 128, no overlap. Block 1: 184 + 40 < 256, so its codes are copied first.
        if count == NF4_BLOCK and gap + p >= 4 * (o + half):
            for i in range(half):
                v = stored[p + i]
                # Little-endian: the first weight is in the low 16 bits.
                pairs[o + i] = table[v >> np.uint8(4)] | (table[v & np.uint8(15)] << np.uint32(16))
        else:
            for i in range(half):
                local[i] = stored[p + i]
            for i in range(count):
                v = local[i >> 1]
                nibble = v & np.uint8(15) if i & 1 else v >> np.uint8(4)
                out[2 * o + i] = np.uint16(table[nibble])


def _nf4_to_floats(stored: Any, scales: Any, code: Any, out: Any, gap: Any) -> None:
    numel = out.size
    half = NF4_BLOCK // 2
    local = np.empty(NF4_BLOCK // 2, np.uint8)
    table = np.empty(16, np.float32)
    for b in range((numel + NF4_BLOCK - 1) // NF4_BLOCK):
        scale = scales[b * (NF4_RECORD_BYTES // 4)]
        for k in range(16):
            table[k] = code[k] * scale
        o, p = b * NF4_BLOCK, b * NF4_RECORD_BYTES + 4
        count = min(NF4_BLOCK, numel - o)
        # As in `_nf4_to_16bit`, with 4 bytes a weight.
        if count == NF4_BLOCK and gap + p >= 4 * (o + NF4_BLOCK):
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


_ONE_127TH = np.float32(7.874015718698502e-3)  # LLM.int8's scale is a row's largest magnitude, which has the code 127
_TO_EXPONENT = np.float32(2.0**120)  # 127 - 7: fp32's bias of exponents less e4m3's


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _int8_value(code: Any, scale: Any) -> Any:
    return np.float32(np.int8(code)) * scale * _ONE_127TH


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _fp8_value(code: Any, scale: Any) -> Any:
    # Exponent (4 bits) and fraction (3 bits), moved to their places in fp32, are a tiny number; a power of two makes up
    # for the other bias. Exact, subnormals included. 0x38 (1.0): 7 << 23 is 2**-120, times 2**120 is 1.
    v = np.int32(code)
    magnitude = float_of(np.int32((v & np.int32(0x7F)) << np.int32(20))) * _TO_EXPONENT
    return float_of(bits_of(magnitude) | np.int32((v & np.int32(0x80)) << np.int32(24))) * scale


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _int8_row(codes: Any, scale: Any, out: Any, kind: Any) -> None:
    if kind == KIND_BF16:
        for i in range(out.size):
            out[i] = _bf16(_int8_value(codes[i], scale))
    else:
        for i in range(out.size):
            out[i] = _fp16(_int8_value(codes[i], scale))


def _int8_to_16bit(stored: Any, scales: Any, out: Any, row_numel: Any, gap: Any, kind: Any) -> None:
    # A record is one row: its scale, a byte per weight, and zeros up to a multiple of 4.
    record = 4 + (row_numel + 3) // 4 * 4
    local = np.empty(row_numel, np.uint8)
    for r in range(out.size // row_numel):
        scale = scales[r * record // 4]
        o, p = r * row_numel, r * record + 4
        # The row's codes begin where its 2-byte output ends, or behind: no overlap. See [Note: unpacking in place].
        if gap + p >= 2 * (o + row_numel):
            _int8_row(stored[p : p + row_numel], scale, out[o : o + row_numel], kind)
        else:
            local[:] = stored[p : p + row_numel]
            _int8_row(local, scale, out[o : o + row_numel], kind)


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _int8_row_of_floats(codes: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = _int8_value(codes[i], scale)


def _int8_to_floats(stored: Any, scales: Any, out: Any, row_numel: Any, gap: Any) -> None:
    record = 4 + (row_numel + 3) // 4 * 4
    local = np.empty(row_numel, np.uint8)
    for r in range(out.size // row_numel):
        scale = scales[r * record // 4]
        o, p = r * row_numel, r * record + 4
        if gap + p >= 4 * (o + row_numel):
            _int8_row_of_floats(stored[p : p + row_numel], scale, out[o : o + row_numel])
        else:
            local[:] = stored[p : p + row_numel]
            _int8_row_of_floats(local, scale, out[o : o + row_numel])


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _fp8_row(codes: Any, factors: Any, out: Any, kind: Any) -> None:
    for t in range(factors.size):
        factor, first, last = factors[t], t * FP8_TILE, min((t + 1) * FP8_TILE, out.size)
        into, source = out[first:last], codes[first:last]  # slices: their loops have plain indices
        if kind == KIND_BF16:
            for i in range(into.size):
                into[i] = _bf16(_fp8_value(source[i], factor))
        else:
            for i in range(into.size):
                into[i] = _fp16(_fp8_value(source[i], factor))


@numba.njit(**_force)  # type: ignore[untyped-decorator]
def _fp8_row_of_floats(codes: Any, factors: Any, out: Any) -> None:
    for t in range(factors.size):
        factor, first, last = factors[t], t * FP8_TILE, min((t + 1) * FP8_TILE, out.size)
        into, source = out[first:last], codes[first:last]
        for i in range(into.size):
            into[i] = _fp8_value(source[i], factor)


def _fp8_to_16bit(stored: Any, scales: Any, out: Any, row_numel: Any, gap: Any, kind: Any) -> None:
    across = (row_numel + FP8_TILE - 1) // FP8_TILE
    local, factors = np.empty(row_numel, np.uint8), np.empty(across, np.float32)
    p = 0
    for r in range(out.size // row_numel):
        if r % FP8_TILE == 0:  # a record of 128 rows begins: padding, scales, codes
            p = (p + 3) // 4 * 4
            factors[:] = scales[p // 4 : p // 4 + across]
            p += 4 * across
        o = r * row_numel
        # As in `_int8_to_16bit`: codes that the row's own 2-byte output would overwrite are copied first.
        if gap + p >= 2 * (o + row_numel):
            _fp8_row(stored[p : p + row_numel], factors, out[o : o + row_numel], kind)
        else:
            local[:] = stored[p : p + row_numel]
            _fp8_row(local, factors, out[o : o + row_numel], kind)
        p += row_numel


def _fp8_to_floats(stored: Any, scales: Any, out: Any, row_numel: Any, gap: Any) -> None:
    across = (row_numel + FP8_TILE - 1) // FP8_TILE
    local, factors = np.empty(row_numel, np.uint8), np.empty(across, np.float32)
    p = 0
    for r in range(out.size // row_numel):
        if r % FP8_TILE == 0:
            p = (p + 3) // 4 * 4
            factors[:] = scales[p // 4 : p // 4 + across]
            p += 4 * across
        o = r * row_numel
        # Whether the codes begin behind the bytes of this row's floats. If not, unpacking would overwrite what it reads.
        if gap + p >= 4 * (o + row_numel):
            _fp8_row_of_floats(stored[p : p + row_numel], factors, out[o : o + row_numel])
        else:
            local[:] = stored[p : p + row_numel]
            _fp8_row_of_floats(local, factors, out[o : o + row_numel])
        p += row_numel


def _widen(stored: Any, out: Any, gap: Any) -> None:
    # 64 weights are copied before they are widened: in place, the output may overlap its own input.
    local = np.empty(64, np.uint16)
    for b in range((out.size + 63) // 64):
        o = b * 64
        count = min(64, out.size - o)
        for i in range(count):
            local[i] = stored[o + i]
        for i in range(count):
            out[o + i] = float_of(np.int32(np.int32(local[i]) << np.int32(16)))
