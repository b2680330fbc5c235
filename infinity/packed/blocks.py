"""Numbers that formats, their kernels and readers of files share: sizes of blocks, and what kernels are told.

Imports nothing: numba, which the kernels need, is imported late.
"""

from __future__ import annotations

NF4_BLOCK, NF4_RECORD_BYTES = 64, 36
"""Weights of a block of NF4, and its bytes: an fp32 scale and 32 bytes of codes."""
FP8_TILE = 128
"""Rows and columns of a tile of fp8."""
APART = 1 << 62
"""As a ``gap`` (see [Note: unpacking in place] in ``infinity.packed.kernels``): packed bytes and weights share no memory."""
KIND_BF16, KIND_FP16 = 0, 1
"""What weights of two bytes are."""
