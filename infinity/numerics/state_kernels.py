"""Loops that encode and decode optimizer states. See `infinity.numerics.compiling`.

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

import math
from typing import Any

import numba
import numpy as np
from numba import types

from infinity.numerics.compiling import bits_of, float_of, inlined, kernel
from infinity.numerics.state_format import STATE_BLOCK, STATE_BLOCK_BYTES

# A block is 256 one-byte codes and an fp32 scale: 260 bytes, or 65 words, of which word 64 is the scale.
_BLOCK, _BLOCK_BYTES = STATE_BLOCK, STATE_BLOCK_BYTES
_BLOCK_WORDS = STATE_BLOCK_BYTES // 4
_NAN = np.int32(0x7FC00000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_ZERO, _ONE = np.int32(0), np.int32(1)
_NONE = np.float32(0.0)

_FLOATS, _CODES, _WORD = types.float32[::1], types.uint8[::1], types.uint32
_ENCODING = types.void(_FLOATS, _CODES, _FLOATS, _WORD, _WORD, types.int32)


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


@kernel(types.void(_FLOATS, types.int16[::1], _WORD, _WORD))
def round_to_bf16(values: Any, stored: Any, key: Any, first: Any) -> None:
    """Write the bits of bf16. ``key`` and ``first`` choose the noise, here and below."""
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


@inlined
def _encode(values: Any, codes: Any, scales: Any, key: Any, first: Any, is_stochastic: Any, of_squares: Any) -> None:
    """Write blocks. ``of_squares`` is a constant in both callers, which thus have loops of their own without its branches."""
    # The levels of roots are twice as many, with one octave more: one exponent less per step, 128 in place of 64.
    lowest, num_codes = (np.int32(7), np.int32(128)) if of_squares else (np.int32(6), np.int32(64))
    step_field, per_unit_field = (np.int32(117), np.int32(137)) if of_squares else (np.int32(118), np.int32(136))
    least = np.float32(8.0**-7) if of_squares else np.float32(8.0**-6)
    for block in range(codes.size // _BLOCK_BYTES):
        largest = _open_block(values, codes, scales, block, 0)
        if largest == _NONE:
            continue
        begin, origin = block * _BLOCK, block * _BLOCK_BYTES
        # Example: size 0.3, that is a value of 0.3 times the largest. It becomes the level 0.2890625 or 0.302734375.
        for i in range(min(_BLOCK, values.size - begin)):
            bits = bits_of(values[begin + i])
            size = float_of(np.int32(bits & _MAGNITUDE)) / largest
            root = np.float32(math.sqrt(size)) if of_squares else size
            # Exponent fields 126, 125 and 124 are octave 0: a field is a power of 2, an octave of 8. `* 11 >> 5`
            # divides by 3, correctly below 32; from 18 on it is clamped. A size of 1 has field 127: -1, clamped to 0.
            # 0.3: field 125, d = 0.
            octave = np.int32((np.int32(126) - np.int32(bits_of(root) >> np.int32(23))) * np.int32(11)) >> np.int32(5)
            octave = min(max(octave, _ZERO), lowest)
            # Floats from their exponent field, 127 is 2**0. start = 8**-(d+1) = 2**(-3-3d): 0.125.
            start = float_of(np.int32((np.int32(124) - np.int32(3) * octave) << np.int32(23)))
            # step = (8**-d - start) / (64 >> d) = 7 * 2**(-9-2d): 7/512.
            step = np.float32(7.0) * float_of(np.int32((step_field - np.int32(2) * octave) << np.int32(23)))
            # 1 / step = 2**(9 + 2 * octave) / 7, as a product with a seventh: a division takes longer. 136 is 127, the
            # bias of an exponent, and 9. Rounding may give the level below or above: the comparison below then goes one
            # up, or stays.
            per_unit = np.float32(1 / 7) * float_of(np.int32((per_unit_field + np.int32(2) * octave) << np.int32(23)))
            place = np.int32((root - start) * per_unit)  # 0.175 * 512 / 7 = 12.8, so 12
            is_least = root < least
            # Below the least level there is only 0.
            low = _NONE if is_least else start + np.float32(place) * step
            high = least if is_least else low + step
            if of_squares:  # the stored value is the square
                low, high = low * low, high * high
            # 1 + 2 + 4 + .. + 2**(5-d) levels are below octave d: (64 >> d) - 1. So code 63 + 12 = 75.
            code = _ZERO if is_least else (num_codes >> octave) - _ONE + place
            fraction = _fraction(key, np.uint32(first + np.uint32(begin + i)), is_stochastic)
            # 0.3 is 0.8 of a step above level 75: up to 76 in four cases of five, or always without noise.
            is_up = size - low > fraction * (high - low)
            if of_squares and is_least:
                # An update divides by the root of this state: a zero would make it a leap. So only zero becomes zero.
                is_up = size > _NONE
            code += _ONE if is_up else _ZERO
            if not of_squares:  # the float's sign bit becomes the code's highest bit
                code |= np.int32(np.int32(bits >> np.int32(24)) & np.int32(128))
            codes[origin + i] = np.uint8(code)


@kernel(_ENCODING)
def encode_signed(values: Any, codes: Any, scales: Any, key: Any, first: Any, is_stochastic: Any) -> None:
    """Write blocks. ``codes`` and ``scales`` are the same memory, here and below."""
    _encode(values, codes, scales, key, first, is_stochastic, False)


@kernel(_ENCODING)
def encode_squares(values: Any, codes: Any, scales: Any, key: Any, first: Any, is_stochastic: Any) -> None:
    """As `encode_signed`, for values that are not negative."""
    _encode(values, codes, scales, key, first, is_stochastic, True)


@kernel(types.void(_FLOATS, _CODES, _FLOATS, _FLOATS, _CODES, types.int64))
def encode_dynamic(values: Any, codes: Any, scales: Any, middles: Any, starts: Any, zero: Any) -> None:
    """Write blocks by the tables of `infinity.numerics.dynamic_map`, rounded to the nearest."""
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


@kernel(types.void(_CODES, _FLOATS, _FLOATS, _FLOATS))
def decode(codes: Any, scales: Any, levels: Any, values: Any) -> None:
    """Write the values of blocks."""
    for block in range(codes.size // _BLOCK_BYTES):
        scale = scales[block * _BLOCK_WORDS + _BLOCK // 4]
        begin, origin = block * _BLOCK, block * _BLOCK_BYTES
        for i in range(min(_BLOCK, values.size - begin)):
            values[begin + i] = levels[codes[origin + i]] * scale
