"""Encodes optimizer states for storage and decodes them: as bf16 or as one byte per element.

Both are rounded stochastically, or as bitsandbytes' 8-bit optimizers do (`infinity.numerics.dynamic_map`).

[Note: rounding] A second moment changes by a thousandth in a step, and the next number that can be stored lies further away:
rounded to nearest it would stand still. So a value is rounded up with the probability that keeps its mean, which needs a
random number per value. Those come from no generator: they are a function of the parameter's name, the state's name, the
number of the update and the index of the element in the parameter (`Noise`). So neither the order of updates nor staging
buffers, budgets or threads change a bit, a run can be repeated, and the user's generators are left alone. State that is loaded
is rounded to nearest, and what was read from here is stored as the very same bytes again (subnormal numbers aside).

[Note: levels] `StateFormat.INT8` follows the block-wise dynamic quantization of "8-bit Optimizers via Block-wise Quantization"
(Dettmers et al., 2021): a code stands for a level between 0 and 1, a level times the largest magnitude of the block is the value,
and levels lie the closer, the larger they are. Here an octave is a factor of 8. The topmost has 64 evenly spaced levels, the
next 32, and so on; the least level is 8 ** -6, below it comes 0, and the eighth bit is the sign. Of second moments the roots
have such levels, twice as many, down to 8 ** -7, for they have no sign. A step is divided by them, and one that became zero
would make it a leap: so what is not zero becomes the least level at least. A block belongs to one parameter. Where a value is
not finite, its whole block becomes NaN.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.numerics.dynamic_map import code_values, codes_of, middles, scales_of_loaded, starts, zero_code
from infinity.numerics.remainder import has_kernels
from infinity.numerics.state_format import STATE_BLOCK, STATE_BLOCK_BYTES, StateFormat

# Adam's second moments are the only squares: a state of another name gets the signed code.
_SQUARES = frozenset({"exp_avg_sq"})
_WORD = 0xFFFFFFFF
_NAN_BITS = 0x7FC00000
_SIGNED_OCTAVES, _SQUARE_OCTAVES = 7, 8


@dataclass(frozen=True)
class Noise:
    """Which random numbers round the elements of a slice."""

    key: int
    """32 bits, different for each parameter, state and update."""
    first: int
    """Index of the slice's first element in the parameter."""

    @classmethod
    def of(cls, fqn: str, state: str, num_updates: int, first: int) -> Noise:
        """For the elements from ``first`` on, in the parameter's ``num_updates``-th update (counted from 1)."""
        text = f"{fqn}\n{state}\n{num_updates}"
        return cls(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little"), first)

    def words(self, numel: int, device: torch.device) -> Tensor:
        """32 random bits for each element, as int64: the finalizer of MurmurHash3 (Appleby) of key and index."""
        # int64, because torch has no uint32 arithmetic: masked after each step, it equals the kernels' uint32.
        word = (torch.arange(self.first, self.first + numel, device=device, dtype=torch.int64) & _WORD) ^ self.key
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD
        return word ^ (word >> 16)


def encode(form: StateFormat, state: str, values: Tensor, stored: Tensor, noise: Noise | None) -> None:
    """Store ``values``.

    Args:
        form: how.
        state: its name, which tells what values there may be.
        values: float32, 1-D without gaps, beginning with a block.
        stored: `StateFormat.part` for them, on the same device; written.
        noise: None: what is stored is loaded, and rounded to nearest. ``INT8_DYNAMIC`` always rounds so.
    """
    if form is StateFormat.FP32 or (form is StateFormat.BF16 and noise is None):
        stored.copy_(values)  # a cast to bf16 rounds to nearest
    # Loaded values of a dynamic state need the search for their scale, which only torch's operations do.
    elif has_kernels(values) and not (form is StateFormat.INT8_DYNAMIC and noise is None):
        _encode_by_kernel(form, state in _SQUARES, values, stored, noise)
    elif form is StateFormat.BF16 and noise is not None:
        # The upper half after 16 bits of noise were added: see `state_kernels.round_to_bf16`, which gives the same bits.
        bits = torch.where(values.isnan(), _NAN_BITS, values.view(torch.int32)).to(torch.int64)
        stored.view(torch.int16).copy_((bits + (noise.words(values.numel(), values.device) >> 16)) >> 16)
    else:
        _encode_blocks(form, state in _SQUARES, values, stored, noise)


def decode(form: StateFormat, state: str, stored: Tensor, values: Tensor) -> None:
    """The inverse of `encode`: write ``values``."""
    if not form.is_one_byte:
        values.copy_(stored)
        return
    levels = (code_values if form is StateFormat.INT8_DYNAMIC else _code_values)(state in _SQUARES)
    if has_kernels(values):
        from infinity.numerics.state_kernels import decode as decode_blocks  # late, see infinity.numerics.remainder

        codes = stored.numpy()
        decode_blocks(codes, codes.view("float32"), levels.numpy(), values.numpy())
        return
    blocks = stored.view(-1, STATE_BLOCK_BYTES)
    # Codes are bytes, but torch indexes with int: uint8 would be a mask.
    decoded = levels.to(stored.device)[blocks[:, :STATE_BLOCK].int()] * _scales(blocks)
    values.copy_(decoded.view(-1)[: values.numel()])


def _encode_by_kernel(form: StateFormat, of_squares: bool, values: Tensor, stored: Tensor, noise: Noise | None) -> None:
    import numpy  # here, as numba: only trainings with such states need them

    from infinity.numerics.state_kernels import encode_dynamic, encode_signed, encode_squares, round_to_bf16

    key, first = (0, 0) if noise is None else (noise.key, noise.first & _WORD)
    where = numpy.uint32(key), numpy.uint32(first)
    if form is StateFormat.BF16:
        round_to_bf16(values.numpy(), stored.view(torch.int16).numpy(), *where)
        return
    codes = stored.numpy()
    blocks = values.numpy(), codes, codes.view("float32")
    if form is StateFormat.INT8_DYNAMIC:
        encode_dynamic(*blocks, middles(of_squares).numpy(), starts(of_squares).numpy(), zero_code(of_squares))
    else:
        (encode_squares if of_squares else encode_signed)(*blocks, *where, noise is not None)


def _encode_blocks(form: StateFormat, of_squares: bool, values: Tensor, stored: Tensor, noise: Noise | None) -> None:
    """States of one byte in torch's operations: what the kernels do."""
    blocks = stored.view(-1, STATE_BLOCK_BYTES)
    # Zeros behind the last element change neither the largest magnitude nor a code.
    padded = torch.zeros(len(blocks) * STATE_BLOCK, dtype=torch.float32, device=values.device)
    padded[: values.numel()] = values
    padded = padded.view(-1, STATE_BLOCK)
    scales = largest = padded.abs().amax(1, keepdim=True)
    if form is StateFormat.INT8_DYNAMIC and noise is None:
        scales = scales_of_loaded(padded, largest, is_unsigned=of_squares)
    is_usable = (largest > 0) & (largest < torch.inf)
    quotients = torch.where(is_usable, padded / scales, 0.0)
    if form is StateFormat.INT8_DYNAMIC:
        codes = codes_of(quotients, is_unsigned=of_squares)
    else:
        codes = _codes_of(quotients, of_squares, noise)
    blocks[:, :STATE_BLOCK] = codes.to(torch.uint8)
    _scales(blocks).copy_(torch.where(is_usable | (largest == 0), scales, torch.nan))


def _codes_of(quotients: Tensor, of_squares: bool, noise: Noise | None) -> Tensor:
    """Codes of values divided by their block's scale: see [Note: levels]."""
    sizes, levels = quotients.abs(), _levels(of_squares).to(quotients.device)
    codes = torch.bucketize(sizes, levels, right=True) - 1  # the level below, or equal
    # There is no level above the highest: its gap is infinite, so that 1 is never rounded up.
    above = torch.cat([levels[1:], levels.new_full((1,), torch.inf)])
    fraction: Any = 0.5
    if noise is not None:
        fraction = ((noise.words(sizes.numel(), sizes.device) >> 8).to(torch.float32) * 2.0**-24).view_as(sizes)
    is_up: Tensor = sizes - levels[codes] > fraction * (above[codes] - levels[codes])
    if of_squares:
        # What is not zero gets the least level at least: an update divides by the root.
        return codes + (is_up | ((codes == 0) & (sizes > 0)))
    return codes + is_up + 128 * quotients.signbit()


def _scales(blocks: Tensor) -> Tensor:
    """The scale of each block, with shape (number of blocks, 1)."""
    return blocks.view(torch.float32)[:, STATE_BLOCK // 4 :]


@functools.cache
def _levels(is_unsigned: bool) -> Tensor:
    """What codes stand for, without the sign: increasing, from 0 to 1, float32 (exactly). See [Note: levels]."""
    num_octaves = _SQUARE_OCTAVES if is_unsigned else _SIGNED_OCTAVES
    levels = [0.0, 8.0 ** (1 - num_octaves)]
    for exponent in range(1, num_octaves):
        # An octave is a factor of 8: from start to 8 * start in 2 ** exponent equal steps. 8 ** -6 and 8 ** -5 enclose
        # 2.
        start, num_steps = levels[-1], 2**exponent
        levels += [start + 7 * start * step / num_steps for step in range(1, num_steps + 1)]
    exact = torch.tensor(levels, dtype=torch.float64, device="cpu")
    return (exact**2 if is_unsigned else exact).to(torch.float32)


@functools.cache
def _code_values(is_unsigned: bool) -> Tensor:
    """What all 256 codes stand for."""
    levels = _levels(is_unsigned)
    # A signed code of 128 and more is a level with the sign: index 128 + i is -levels[i].
    return levels if is_unsigned else torch.cat([levels, -levels])


# -------------------------------------------------------------------------------------------------- part by part

_HOST_NUMEL = 1 << 18
"""Elements decoded at a time on the CPU, 1 MiB of each state: they stay in cache, and calls cost little beside them."""
# On a GPU a part costs kernel launches, and its memory (16 MiB per state) is no cache's: so parts are larger.
_DEVICE_NUMEL = 1 << 22


class StateWindow:
    """Gives float32 states to work on in place, and stores them again. For any number of threads.

    For each it keeps memory for one part of each state; states that are stored as float32 are worked on where they are.
    """

    def __init__(self, form: StateFormat) -> None:
        self._form = form
        self._of_thread = threading.local()

    def parts(
        self, stored: Mapping[str, Tensor], numel: int, noise: Callable[[str, int], Noise]
    ) -> Iterator[tuple[slice, Mapping[str, Tensor]]]:
        """Open a slice of a parameter. What is changed in a part is stored when the next one is asked for.

        Args:
            stored: for each state, `StateFormat.part` for the slice.
            numel: elements of the slice.
            noise: for a state and a part, given by its first element in the slice.

        Yields:
            Elements of the slice, from the first on, and their states: float32, 1-D. Parts are cut at multiples of 64
            elements.
        """
        if self._form is StateFormat.FP32:
            yield slice(0, numel), stored
            return
        # Both are multiples of a block (256), so that a part begins with one, and of 64: see [Note: why 64 elements] in
        # `infinity.units.layout`.
        is_on_host = all(values.device.type == "cpu" for values in stored.values())
        part_numel = _HOST_NUMEL if is_on_host else _DEVICE_NUMEL
        for start in range(0, numel, part_numel):
            span = slice(start, min(start + part_numel, numel))
            places = {name: self._form.part(values, span) for name, values in stored.items()}
            views = {
                # Always the size of a whole part, so that it is allocated once per thread, state and device.
                name: self._memory(name, place.device, part_numel)[: span.stop - start]
                for name, place in places.items()
            }
            for name, place in places.items():
                decode(self._form, name, place, views[name])
            # The caller updates the views in place; it resumes the generator when it is done with them.
            yield span, views
            for name, place in places.items():
                encode(self._form, name, views[name], place, noise(name, start))

    def _memory(self, name: str, device: torch.device, numel: int) -> Tensor:
        scratch: dict[tuple[str, torch.device], Tensor] = vars(self._of_thread).setdefault("tensors", {})
        found = scratch.get((name, device))
        if found is None:
            found = scratch[name, device] = torch.empty(numel, dtype=torch.float32, device=device)
        return found
