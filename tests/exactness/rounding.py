"""Optimizer states as they come back from storage, worked out slowly and by other means than the packages'.

- Random numbers are MurmurHash3's finalizer of a key and the element's index in the parameter. The key is taken from the
  parameter's name, the state's name, and the number of the update.
- bf16: the lower 16 bits are dropped, after a random number of 16 bits was added.
- int8: blocks of 256 elements of a parameter, each value between two levels times the block's largest magnitude. Levels are
  listed, found by bisection, and compared in float32.
- int8_dynamic: such blocks with the levels of bitsandbytes, between two of which the middle decides.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

_SQUARES = ("exp_avg_sq",)
_BLOCK = 256


def rounded(values: torch.Tensor, kind: str, fqn: str, state: str, num_updates: int) -> torch.Tensor:
    """``values`` (float32) after the update with this number was stored and read again, of the same shape.

    Args:
        values: a state of a parameter.
        kind: ``fp32``, ``bf16``, ``int8`` or ``int8_dynamic``.
        fqn, state, num_updates: what the random numbers depend on; updates are counted from 1.
    """
    if kind == "fp32":
        return values
    in_memory_order = values.as_strided((values.numel(),), (1,)) if values.numel() else values.reshape(-1)
    flat = in_memory_order.detach().cpu().numpy()
    noise = _random_words(flat.size, f"{fqn}\n{state}\n{num_updates}")
    if kind == "int8_dynamic":
        result = _dynamic(flat, state in _SQUARES)
    else:
        result = _half(flat, noise) if kind == "bf16" else _bytes(flat, noise, state in _SQUARES)
    ordered = torch.empty_like(values)
    ordered.as_strided((values.numel(),), (1,)).copy_(torch.from_numpy(result))
    return ordered


def _random_words(count: int, text: str) -> Any:
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    word = np.arange(count, dtype=np.uint64) ^ np.uint64(key)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor) % np.uint64(1 << 32)
    return word ^ (word >> np.uint64(16))


def _half(values: Any, noise: Any) -> Any:
    bits = values.view(np.uint32).astype(np.uint64) + (noise >> np.uint64(16))
    return (bits // 0x10000 * 0x10000).astype(np.uint32).view(np.float32)


def _levels(num_bits: int) -> list[float]:
    """0, then ``num_bits`` octaves of a factor of 8 that end at 1, with 1, 2, 4, ... levels."""
    found = [0.0]
    for octave in range(num_bits):
        top = 8.0 ** (octave + 1 - num_bits)
        found += [top / 8 + (top - top / 8) * number / 2**octave for number in range(1, 2**octave + 1)]
    return found


def _bytes(values: Any, noise: Any, is_unsigned: bool) -> Any:
    exact = _levels(8 if is_unsigned else 7)
    levels = np.array([level**2 for level in exact] if is_unsigned else exact, dtype=np.float32)
    chance = (noise // 256).astype(np.float32) / np.float32(1 << 24)
    result = np.zeros_like(values)
    for start in range(0, values.size, _BLOCK):
        block, chances = values[start : start + _BLOCK], chance[start : start + _BLOCK]
        largest = np.abs(block).max()
        if largest == 0:
            continue
        sizes = np.abs(block) / largest
        below = np.searchsorted(levels, sizes, side="right") - 1
        above = np.minimum(below + 1, levels.size - 1)
        is_up = sizes - levels[below] > chances * (levels[above] - levels[below])
        if is_unsigned:
            is_up |= (below == 0) & (sizes > 0)
        result[start : start + _BLOCK] = np.where(is_up, levels[above], levels[below]) * largest * np.sign(block)
    return result


def _dynamic(values: Any, is_unsigned: bool) -> Any:
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + is_unsigned) + 1)
        found += (10 ** (decade - 6) * ((edges[1:] + edges[:-1]) / 2)).tolist()
    levels = np.array(sorted(found), dtype=np.float32)
    middles = (levels[1:] + levels[:-1]) / np.float32(2)
    result = np.zeros_like(values)
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        largest = np.abs(block).max()
        if largest == 0:
            continue
        nearest = levels[np.searchsorted(middles, np.abs(block) / largest)]
        if not is_unsigned:  # no -1, and nothing that is negative becomes zero
            nearest = np.where(block < 0, np.clip(nearest, levels[1], levels[-2]), nearest)
        result[start : start + _BLOCK] = np.copysign(nearest * largest, block) * (nearest > 0)
    return result
