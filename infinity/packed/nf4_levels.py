"""The 16 levels of NF4, and the thresholds between them.

They are the levels of "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al., 2023), as in bitsandbytes.
"""

from __future__ import annotations

import torch

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
