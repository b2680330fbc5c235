"""The 8-bit states of bitsandbytes: each value is a level of a dynamic map times the largest magnitude of its block.

From "8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021) and the numbers that bitsandbytes computes;
the code is our own. Each decade has half as many levels as the one above it: the midpoints of equal parts of the
decade.

    signed     64 levels from 0.1 to 1, 32 from 0.01 to 0.1, ... 1 from 1e-7 to 1e-6; the same below zero; 0 and 1
    squares   128 levels from 0.1 to 1, 64 from 0.01 to 0.1, ... 2 from 1e-7 to 1e-6; 0 and 1

A code is the level's number, from the lowest on. A value gets the nearest level (of two that are equally near, the smaller
magnitude), and what is below zero never becomes zero. There is no -1: where the largest magnitude of a block belongs to a
negative value, that shrinks by 0.7 %.

[Note: loading] State that is loaded has to have the same values as when it was read, or a run would not go on with the same
bits. As the largest magnitude of a block may be 0.993 times its scale, `scales_of_loaded` looks for the scale for which all
values of the block are levels; only where there is none, the largest magnitude is the scale.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_DECADES = 7


@functools.cache
def magnitudes(is_unsigned: bool) -> Tensor:
    """The levels that are not negative: increasing, from 0 to 1, float32.

    ``is_unsigned``: for a state that averages squares, so no level is negative.
    """
    ends = torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")
    # Decade 0 is 1e-7 .. 1e-6, decade 6 is 0.1 .. 1. Signed: 1 + 2 + .. + 64 = 127 levels, and with 0 and 1 129.
    # Squares need no sign, so each decade has twice as many: 2 + 4 + .. + 128 = 254, and with 0 and 1 all 256 codes.
    levels = [ends[:1]]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + is_unsigned) + 1, dtype=torch.float32, device="cpu")
        levels.append((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (decade + 1 - _DECADES))
    return torch.cat([*levels, ends[1:]])


@functools.cache
def code_values(is_unsigned: bool) -> Tensor:
    """What all 256 codes stand for: increasing, float32."""
    levels = magnitudes(is_unsigned)
    # Signed: 127 negative levels, 0 is code 127, 128 positive levels. The slice leaves 0 and -1 out.
    return levels if is_unsigned else torch.cat([-levels[1:-1].flip(0), levels])


def zero_code(is_unsigned: bool) -> int:
    """The code of 0. Those of larger magnitudes lie above it, and below it if they are negative."""
    return 256 - magnitudes(is_unsigned).numel()


@functools.cache
def middles(is_unsigned: bool) -> Tensor:
    """Between two levels each: a quotient that is larger gets the upper one. The last is infinity, float32."""
    levels = magnitudes(is_unsigned)
    return torch.cat([(levels[1:] + levels[:-1]) / 2, levels.new_full((1,), torch.inf)])


@functools.cache
def starts(is_unsigned: bool) -> Tensor:
    """For the upper 16 bits of a quotient from 0 to 1: how many middles lie below the least such quotient, uint8.

    The next middle is the only one that may lie among the quotients with these bits.
    """
    # 0x3F800000 is 1.0, the largest quotient. Positive floats are ordered as their bits, so bits >> 16 is an index of a
    # table of 16,257 bytes. It replaces the binary search of `codes_of` by one lookup and one comparison.
    least = (torch.arange((0x3F800000 >> 16) + 1, dtype=torch.int32, device="cpu") << 16).view(torch.float32)
    return torch.bucketize(least, middles(is_unsigned)).to(torch.uint8)


def codes_of(quotients: Tensor, *, is_unsigned: bool) -> Tensor:
    """Codes of values divided by their block's scale, in torch's operations: what the kernel does. uint8, of the same shape."""
    found = torch.bucketize(quotients.abs(), middles(is_unsigned).to(quotients.device))
    if is_unsigned:
        return found.to(torch.uint8)
    # At least level 1, so that a negative value stays negative; at most level 127, because there is no code for -1.
    below = found.clamp(1, zero_code(False))
    return (zero_code(False) + torch.where(quotients < 0, -below, found)).to(torch.uint8)


def scales_of_loaded(blocks: Tensor, largest: Tensor, *, is_unsigned: bool) -> Tensor:
    """Scales by which loaded values are levels, as far as there are such: see [Note: loading].

    Args:
        blocks: float32, [blocks, 256].
        largest: the largest magnitude of each block, [blocks, 1].
    """
    if is_unsigned:
        return largest
    # If the largest magnitude was a negative level, the scale was this magnitude / 0.993. The division may round to a
    # neighbour of the scale that was stored, so both neighbours are tried as well.
    levels = code_values(False).to(blocks.device)
    near = largest / levels[0].abs()
    up = torch.full_like(near, torch.inf)
    scales, is_known = largest, _are_levels(blocks, largest, levels)
    for candidate in (near, torch.nextafter(near, up), torch.nextafter(near, -up)):
        is_it = ~is_known & _are_levels(blocks, candidate, levels)
        scales, is_known = torch.where(is_it, candidate, scales), is_known | is_it
    return scales


def _are_levels(blocks: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Whether all values of each block are levels times its scale, [blocks, 1]."""
    codes = codes_of(torch.where(scales > 0, blocks / scales, 0.0), is_unsigned=False)
    return (levels[codes.int()] * scales == blocks).all(1, keepdim=True)
