"""Loops that encode and decode optimizer states, compiled by numba at their first use.

``infinity.numerics.state_codec`` defines the results, in torch's own operations: a table of levels and a search in it.

[Note: no branches] A search per element is slow. So levels are computed, not looked up, and all elements of a block
take the same path: what does not apply to one of them is discarded in the end. So the compiler makes vector code of the
loops, which is ten times as fast. All constants follow from the levels. A size between 0 and 1 is in octave d, from
8**-(d+1) to 8**-d, which has 2**(bits-1-d) steps of equal size, where a signed code has 7 bits and that of a root has
8:

    sizes      0 |  8**-6 .. 8**-5 | 8**-5 .. 8**-4 |  ...  | 1/64 .. 1/8  |  1/8 .. 1
    octave       |       5         |       4        |       |      1       |     0        clamped: 6 is "below the least"
    steps        |       2         |       4        |       |     32       |    64        64 >> d
    codes      0 |     1 .. 3      |     3 .. 7     |       |  31 .. 63    |  63 .. 127   first: (64 >> d) - 1

Start, step and each level are exact in float32 (at most 10 bits), and so is ``size - start``, for start is a power of
two. Only the seventh and the product with it are rounded. Tried with all 176 million sizes from 8**-7 to 1: ``place``
is that of a search, except for 22 sizes (41 roots) within 7e-8 below a level. Those get that level at once, nearly
always the search's result, too, after rounding.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from infinity.numerics.kernels import Kernel, bits_of, compiled, float_of
from infinity.numerics.state_format import STATE_BLOCK, STATE_BLOCK_BYTES


class StateKernels(NamedTuple):
    """Compiled functions over 1-D arrays without gaps. ``key`` and ``first`` (uint32) choose the noise.

    Attributes:
        round_to_bf16: `(values: float32, stored: int16, key, first)`: writes the bits of bf16.
        encode_signed: `(values: float32, codes: uint8, scales: float32, key, first, is_stochastic: int32)`: writes blocks.
            ``codes`` and ``scales`` are the same memory.
        encode_squares: the same for values that are not negative.
        encode_dynamic: `(values: float32, codes: uint8, scales: float32, middles: float32, starts: uint8, zero: int64)`: the
            same by the tables of `infinity.numerics.dynamic_map`, rounded to the nearest.
        decode: `(codes: uint8, scales: float32, levels: float32, values: float32)`: writes ``values``.
    """

    round_to_bf16: Kernel
    encode_signed: Kernel
    encode_squares: Kernel
    encode_dynamic: Kernel
    decode: Kernel


@functools.cache
def state_kernels() -> StateKernels:
    """The kernels, compiled for this processor, or read from numba's cache."""
    words16, floats, codes, word = types.int16[::1], types.float32[::1], types.uint8[::1], types.uint32
    encode = [types.void(floats, codes, floats, word, word, types.int32)]
    return StateKernels(
        round_to_bf16=compiled(_round_to_bf16, [types.void(floats, words16, word, word)]),
        encode_signed=compiled(_encode_signed, encode),
        encode_squares=compiled(_encode_squares, encode),
        encode_dynamic=compiled(_encode_dynamic, [types.void(floats, codes, floats, floats, codes, types.int64)]),
        decode=compiled(_decode, [types.void(codes, floats, floats, floats)]),
    )


# A block is 256 one-byte codes and an fp32 scale: 260 bytes, or 65 words, of which word 64 is the scale.
_BLOCK, _BLOCK_BYTES = STATE_BLOCK, STATE_BLOCK_BYTES
_BLOCK_WORDS = STATE_BLOCK_BYTES // 4
_NAN = np.int32(0x7FC00000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ZERO, _ONE = np.int32(0), np.int32(1)
_NONE = np.float32(0.0)


@numba.njit(inline="always")
def _noise(key: Any, index: Any) -> Any:
    # The finalizer of MurmurHash3 (Appleby): the same words as `Noise.words` in torch, without a generator's state.
    word = np.uint32(index ^ key)
    word = np.uint32((word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    word = np.uint32((word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(word ^ (word >> np.uint32(16)))


@numba.njit(inline="always")
def _fraction(key: Any, index: Any, is_stochastic: Any) -> Any:
    # 24 bits: exact in float32 and below 1, so a size that is a level stays it.
    noise = np.float32(np.int32(_noise(key, index) >> np.uint32(8))) * np.float32(2.0**-24)
    return noise if is_stochastic else np.float32(0.5)


def _round_to_bf16(values: Any, stored: Any, key: Any, first: Any) -> None:
    for i in range(values.size):
        value = values[i]
        # Noise of 16 bits carries into the upper half as often as the lower half says: 0x....4000 in a quarter of all
        # cases. Only a NaN could wrap, so it is made canonical first.
        bits = bits_of(value)
        if value != value:
            bits = _NAN
        noise = np.int32(_noise(key, np.uint32(first + np.uint32(i))) >> np.uint32(16))
        stored[i] = np.int16(np.int32(bits + noise) >> np.int32(16))


@numba.njit(inline="always")
def _open_block(values: Any, codes: Any, scales: Any, block: Any, zero: Any) -> Any:
    """The block's largest magnitude, written as its scale; or 0 if nothing is left to be done. ``zero`` is the code of 0."""
    begin, end = block * _BLOCK, min((block + 1) * _BLOCK, values.size)
    # Without the sign, bits as integers order NaN above infinity above all numbers: one integer maximum finds the
    # scale, and shows whether the block has a value that is not finite.
    bits = _ZERO
    for i in range(begin, end):
        bits = max(bits, np.int32(bits_of(values[i]) & _MAGNITUDE))
    largest = float_of(bits)
    is_usable = largest > _NONE and largest < np.float32(np.inf)
    # A block of zeros keeps scale 0, and decodes to zeros. One with a value that is not finite decodes to NaN
    # throughout.
    scales[block * _BLOCK_WORDS + _BLOCK // 4] = largest if largest == _NONE or is_usable else np.float32(np.nan)
    # A last block that is not full: the codes behind its elements are written too, or a record would hold old bytes.
    if not is_usable or end - begin < _BLOCK:
        for i in range(block * _BLOCK_BYTES, block * _BLOCK_BYTES + _BLOCK):
            codes[i] = np.uint8(zero)
    return largest if is_usable else _NONE


def _encode_signed(values: Any, codes: Any, scales: Any, key: Any, first: Any, is_stochastic: Any) -> None:
    for block in range(codes.size // _BLOCK_BYTES):
        largest = _open_block(values, codes, scales, block, 0)
        if largest == _NONE:
            continue
        begin, origin = block * _BLOCK, block * _BLOCK_BYTES
        # Example: size 0.3, that is a value of 0.3 times the largest. It becomes the level 0.2890625 or 0.302734375.
        for i in range(min(_BLOCK, values.size - begin)):
            bits = bits_of(values[begin + i])
            size = float_of(np.int32(bits & _MAGNITUDE)) / largest
            # Exponent fields 126, 125 and 124 are octave 0: a field is a power of 2, an octave of 8. `* 11 >> 5`
            # divides by 3, correctly below 32; from 18 on it is clamped. A size of 1 has field 127: -1, clamped to 0.
            # 0.3: field 125, d = 0.
            octave = np.int32((np.int32(126) - np.int32(bits_of(size) >> np.int32(23))) * np.int32(11)) >> np.int32(5)
            octave = min(max(octave, _ZERO), np.int32(6))
            # Floats from their exponent field, 127 is 2**0. start = 8**-(d+1) = 2**(-3-3d): 0.125.
            start = float_of(np.int32((np.int32(124) - np.int32(3) * octave) << np.int32(23)))
            # step = (8**-d - start) / (64 >> d) = 7 * 2**(-9-2d): 7/512.
            step = np.float32(7.0) * float_of(np.int32((np.int32(118) - np.int32(2) * octave) << np.int32(23)))
            # 1 / step, as a product with a seventh: a division takes longer.
            # 1 / step = 2**(10 + 2 * octave) / 7; 137 is 127, the bias of an exponent, and 10. Rounding may give the level
            # below or above: the comparison of squares below then goes one up, or stays.
            per_unit = np.float32(1 / 7) * float_of(np.int32((np.int32(136) + np.int32(2) * octave) << np.int32(23)))
            place = np.int32((size - start) * per_unit)  # 0.175 * 512 / 7 = 12.8, so 12
            is_least = size < np.float32(8.0**-6)
            # Below the least level there is only 0.
            level = _NONE if is_least else start + np.float32(place) * step
            gap = np.float32(8.0**-6) if is_least else step
            # 1 + 2 + 4 + .. + 2**(5-d) levels are below octave d: (64 >> d) - 1. So code 63 + 12 = 75.
            code = _ZERO if is_least else (np.int32(64) >> octave) - _ONE + place
            fraction = _fraction(key, np.uint32(first + np.uint32(begin + i)), is_stochastic)
            # 0.3 is 0.8 of a step above level 75: up to 76 in four cases of five, or always without noise.
            code += _ONE if size - level > fraction * gap else _ZERO
            # The float's sign bit becomes the code's highest bit.
            codes[origin + i] = np.uint8(code | np.int32(np.int32(bits >> np.int32(24)) & np.int32(128)))


def _encode_squares(values: Any, codes: Any, scales: Any, key: Any, first: Any, is_stochastic: Any) -> None:
    for block in range(codes.size // _BLOCK_BYTES):
        largest = _open_block(values, codes, scales, block, 0)
        if largest == _NONE:
            continue
        begin, origin = block * _BLOCK, block * _BLOCK_BYTES
        for i in range(min(_BLOCK, values.size - begin)):
            # As in `_encode_signed`, with levels for the root, of which there are twice as many: one exponent less per
            # step, 128 in place of 64. Rounding compares the squares, because the stored value is the square.
            size = float_of(np.int32(bits_of(values[begin + i]) & _MAGNITUDE)) / largest
            root = np.float32(math.sqrt(size))
            octave = np.int32((np.int32(126) - np.int32(bits_of(root) >> np.int32(23))) * np.int32(11)) >> np.int32(5)
            octave = min(max(octave, _ZERO), np.int32(7))
            start = float_of(np.int32((np.int32(124) - np.int32(3) * octave) << np.int32(23)))
            step = np.float32(7.0) * float_of(np.int32((np.int32(117) - np.int32(2) * octave) << np.int32(23)))
            per_unit = np.float32(1 / 7) * float_of(np.int32((np.int32(137) + np.int32(2) * octave) << np.int32(23)))
            place = np.int32((root - start) * per_unit)
            is_least = root < np.float32(8.0**-7)
            low = _NONE if is_least else start + np.float32(place) * step
            high = np.float32(8.0**-7) if is_least else low + step
            low, high = low * low, high * high
            code = _ZERO if is_least else (np.int32(128) >> octave) - _ONE + place
            fraction = _fraction(key, np.uint32(first + np.uint32(begin + i)), is_stochastic)
            is_up = size - low > fraction * (high - low)
            # An update divides by the root of this state: a zero would make it a leap. So only zero becomes zero.
            is_up = size > _NONE if is_least else is_up
            codes[origin + i] = np.uint8(code + (_ONE if is_up else _ZERO))


def _encode_dynamic(values: Any, codes: Any, scales: Any, middles: Any, starts: Any, zero: Any) -> None:
    for block in range(codes.size // _BLOCK_BYTES):
        largest = _open_block(values, codes, scales, block, zero)
        if largest == _NONE:
            continue
        begin, origin = block * _BLOCK, block * _BLOCK_BYTES
        for i in range(min(_BLOCK, values.size - begin)):
            value = values[begin + i]
            size = abs(value) / largest
            # The upper 16 bits of the quotient leave two levels: one comparison decides, see `dynamic_map.starts`.
            level = np.int32(starts[bits_of(size) >> np.int32(16)])
            level += _ONE if size > middles[level] else _ZERO
            if value < _NONE and zero > 0:  # signed: there is no code for -1, and no negative value becomes zero
                level = -min(max(level, _ONE), np.int32(zero))

            codes[origin + i] = np.uint8(np.int32(zero) + level)


def _decode(codes: Any, scales: Any, levels: Any, values: Any) -> None:
    for block in range(codes.size // _BLOCK_BYTES):
        scale = scales[block * _BLOCK_WORDS + _BLOCK // 4]
        begin, origin = block * _BLOCK, block * _BLOCK_BYTES
        for i in range(min(_BLOCK, values.size - begin)):
            values[begin + i] = levels[codes[origin + i]] * scale
