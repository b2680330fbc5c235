"""Sizes of blocks, and the levels of NF4 with the thresholds between them: what formats, kernels and readers of files share.

The levels are those of "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al., 2023), as in bitsandbytes.
"""

from __future__ import annotations

import torch

# No import of numba here, which only whoever packs or unpacks needs.
NF4_BLOCK, NF4_RECORD_BYTES = 64, 36
"""Weights of a block, as in bitsandbytes, and its bytes: an fp32 scale, and 64 codes of 4 bits in 32 bytes."""
FP8_TILE = 128
"""Rows and columns of a tile with one scale, as DeepSeek-V3 has them."""
INT8_FACTOR = 7.874015718698502e-3
"""1/127 in fp32: LLM.int8's scale is a row's largest magnitude, which has the code 127."""
APART = 1 << 62
"""As a ``gap`` (see [Note: unpacking in place] in ``infinity.packed.kernels``): packed bytes and weights share no memory."""

LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    dtype=torch.float32,
    device="cpu",
)
THRESHOLDS = (LEVELS[1:] + LEVELS[:-1]) / 2
"""The 15 middles between levels. A weight gets level k if k thresholds are below its quotient by the scale."""
