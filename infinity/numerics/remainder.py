"""A float32 main weight as a bf16 model weight and a 16-bit remainder, and back, without losing a bit.

    bits of a float32    | sign, exponent, 7 bits of fraction | 16 more bits of fraction |
    model weight (bf16)  = (bits + 0x8000) >> 16                rounded to nearest, halves away from zero
    remainder (int16)    = bits - (model weight << 16)          how far the main weight is from the model weight

Torch rounds halves to even instead; that is the only difference between its cast and this model weight. Everything but
NaN comes back exactly, infinities, subnormals and the sign of zero included. The largest finite numbers have an
infinite model weight and a negative remainder. Every NaN becomes 0x7fc00000.
"""
# Example: 1.005859375 has the bits 0x3F80C000. Model weight: (0x3F80C000 + 0x8000) >> 16 = 0x3F81, which is 1.0078125.
# Remainder: 0x3F80C000 - 0x3F810000 = -0x4000. Joined: 0x3F810000 - 0x4000 = 0x3F80C000.

from __future__ import annotations

import torch

REMAINDER_DTYPE = torch.int16
"""dtype of remainders."""
_NAN_BITS = 0x7FC00000  # Of another NaN the model weight may be a number: 0x7FFFFFFF + 0x8000 wraps to -0.0.


def split(main: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write model weight and remainder of ``main``.

    Args:
        main: float32, 1-D without gaps, on any device.
        weight: bf16, of the same shape and device, without gaps; receives the model weight.
        remainder: int16, likewise; receives the remainder.
    """
    if has_kernels(main):
        from infinity.numerics.kernels import split as split_words

        split_words(main.numpy(), weight.view(torch.int16).numpy(), remainder.numpy())
        return
    high, low = split_bits(main)
    weight.view(torch.int16).copy_(high)
    remainder.copy_(low)


def join(weight: torch.Tensor, remainder: torch.Tensor, main: torch.Tensor) -> None:
    """The inverse of `split`: write ``main`` from its two parts."""
    if has_kernels(main):
        from infinity.numerics.kernels import join as join_words

        join_words(weight.view(torch.int16).numpy(), remainder.numpy(), main.numpy())
        return
    main.view(torch.int32).copy_(join_bits(weight.view(torch.int16), remainder))


def split_bits(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of the model weight and the remainder of ``main`` (float32), both int16, by torch's integer operations."""
    bits = torch.where(main.isnan(), _NAN_BITS, main.view(torch.int32))
    # >> is arithmetic: it keeps the sign bit, so the upper half fits into int16.
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def join_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_bits`: the bits of the main weight, int32."""
    return (high.to(torch.int32) << 16) + low


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether compiled loops can take the tensor's memory."""
    # Late: numba costs half a second and 60 MB, and only fused Adam and trainings with remainders need it.
    from infinity.numerics.compiling import can_compile

    return tensor.device.type == "cpu" and can_compile()
