"""Sizes of blocks and constants that formats, kernels and readers of files share."""

from __future__ import annotations

# No imports here: the kernels' module imports numba, which only whoever packs or unpacks needs.
NF4_BLOCK, NF4_RECORD_BYTES = 64, 36
"""Weights of a block, as in bitsandbytes, and its bytes: an fp32 scale, and 64 codes of 4 bits in 32 bytes."""
FP8_TILE = 128
"""Rows and columns of a tile with one scale, as DeepSeek-V3 has them."""
APART = 1 << 62
"""As a ``gap`` (see [Note: unpacking in place] in ``infinity.packed.kernels``): packed bytes and weights share no memory."""
