"""The 2-norm of a bf16 tensor: the bits of its fp32 copy's norm, without that copy.

[Note: norms as torch sums them] On the CPU torch cannot take the norm of a bf16 tensor in fp32 without a copy of twice
the size, and on fresh memory that takes ten times as long as the norm. Torch's norm of a tensor without gaps keeps as
many sums as the processor's vectors have elements: the square of element i is added to sum i modulo their number. In
the end it adds up the sums, then the squares of the elements left over, and takes the root. All of it is fp32, where
the square of a bf16 is exact. The same order gives the same bits with little memory. Whether torch does it this way is
probed on this processor. If not, torch takes the norm of a copy.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

# Elements per pass of the numpy variant: 128 KiB of fp32 squares, small enough for a core's cache.
_BLOCK_NUMEL = 1 << 15
_NUM_SUMS = (8, 16, 4)  # fp32 elements of a vector register: AVX2, AVX-512, NEON; the most frequent first.
# Less than a vector; many vectors in one block; more than two blocks and a rest.
_PROBE_NUMELS = (5, 1000, 2 * _BLOCK_NUMEL + 13)

AddSquares = Callable[[torch.Tensor, "np.ndarray[Any, Any]"], None]
"""Adds the squares of bf16 values (1-D, a multiple of the sums' number) to sums (fp32), in turn."""


def narrow_norm(tensor: torch.Tensor) -> torch.Tensor:
    """2-norm of all elements.

    Args:
        tensor: bf16, on the CPU, its elements in whatever order of dimensions but without gap or overlap in memory.

    Returns:
        0-dim fp32 tensor: the bits of ``torch.linalg.vector_norm(tensor.float(), 2.0)``.
    """
    num_sums = _torchs_num_sums()
    if num_sums == 0:
        copied: torch.Tensor = torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float32)
        return copied
    return _norm(tensor, num_sums, _choose(num_sums))


def _norm(tensor: torch.Tensor, num_sums: int, add_squares: AddSquares) -> torch.Tensor:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    sums = np.zeros(num_sums, np.float32)
    end = flat.numel() // num_sums * num_sums
    with np.errstate(all="ignore"):  # an infinite norm is the caller's business
        if end:
            add_squares(flat[:end], sums)
        rest = flat[end:].float().numpy()
        # One after the other in fp32: np.sum adds pairwise, which gives other bits.
        total = np.add.accumulate(np.concatenate((sums, rest * rest)))[-1]
        return torch.tensor(np.sqrt(total), dtype=torch.float32, device="cpu")


def _choose(num_sums: int) -> AddSquares:
    """Return numba's loop if numba is loaded already: loading it for the norm alone would take too much memory."""
    if "infinity.numerics.compiling" not in sys.modules:
        return _add_squares
    from infinity.numerics import kernels  # which waits for a thread that is loading it
    from infinity.numerics.compiling import can_compile

    if not can_compile() or num_sums != kernels.NUM_SUMS:
        return _add_squares
    return lambda values, sums: kernels.add_squares(values.view(torch.int16).numpy(), sums)


def _add_squares(values: torch.Tensor, sums: np.ndarray[Any, Any]) -> None:
    rows = torch.empty(1 + min(values.numel(), _BLOCK_NUMEL) // len(sums), len(sums), dtype=torch.float32, device="cpu")
    for start in range(0, values.numel(), _BLOCK_NUMEL):
        block = values[start : start + _BLOCK_NUMEL].view(-1, len(sums))
        squares = rows[: 1 + len(block)]
        # The sums so far are the first row, so the reduction continues them in torch's order.
        squares[0] = torch.from_numpy(sums)
        torch.mul(squares[1:].copy_(block), squares[1:], out=squares[1:])
        np.add.reduce(squares.numpy(), axis=0, out=sums)  # row by row: over the first axis numpy adds in sequence


@functools.cache
def _torchs_num_sums() -> int:
    """How many sums torch has here; 0 if it goes another way."""
    generator = torch.Generator().manual_seed(0)
    drawn = [_draw(numel, generator) for numel in _PROBE_NUMELS]
    wanted = [torch.linalg.vector_norm(values.float(), 2.0) for values in drawn]
    for num_sums in _NUM_SUMS:
        found = [_norm(values, num_sums, _add_squares) for values in drawn]
        if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
            return num_sums
    logger.info(
        "norms of bf16 gradients are computed from fp32 copies, because torch adds in another order on this processor"
    )
    return 0


def _draw(numel: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
    # Magnitudes over six decades, so that another order of addition shows in the bits.
    decades = torch.rand(numel, generator=generator, dtype=torch.float32, device="cpu")
    return (values * 10.0 ** (-6 * decades)).bfloat16()
