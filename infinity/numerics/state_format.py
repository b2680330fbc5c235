"""How an element-wise optimizer state is stored: its dtype, and where its elements are.

Of a state in memory or in a record:

    fp32, bf16   one number per element
    int8         | 256 codes | scale | 256 codes | scale | ...      a code is a byte, a scale is fp32
    int8_dynamic the same with other levels
"""

from __future__ import annotations

import enum

import torch

STATE_BLOCK = 256
"""Elements that share a scale where a state is a byte."""
STATE_BLOCK_BYTES = STATE_BLOCK + 4
# Format -> dtype of the stored tensor, elements per block, bytes per block.
_LAYOUTS = {
    "fp32": (torch.float32, 1, 4),
    "bf16": (torch.bfloat16, 1, 2),
    "int8": (torch.uint8, STATE_BLOCK, STATE_BLOCK_BYTES),
    "int8_dynamic": (torch.uint8, STATE_BLOCK, STATE_BLOCK_BYTES),
}


class StateFormat(enum.Enum):
    """What a stored state is made of."""

    FP32 = "fp32"
    """fp32 values."""
    BF16 = "bf16"
    """bf16 values, rounded stochastically."""
    INT8 = "int8"
    """A code for each value: a level between 0 and the block's largest magnitude, rounded stochastically."""
    INT8_DYNAMIC = "int8_dynamic"
    """The same with the levels of bitsandbytes' 8-bit optimizers, rounded to nearest:
    `infinity.numerics.dynamic_map`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor in which a state is stored."""
        return _LAYOUTS[self.value][0]

    @property
    def is_one_byte(self) -> bool:
        """Whether an element is a byte, and a block has a scale."""
        return self.dtype == torch.uint8

    @property
    def block_numel(self) -> int:
        """Elements that are stored together: a parameter starts with a block, and may be cut between two."""
        return _LAYOUTS[self.value][1]

    def num_bytes(self, numel: int) -> int:
        """Bytes of a state of ``numel`` elements; the last block is whole."""
        _, block_numel, block_bytes = _LAYOUTS[self.value]
        return -(-numel // block_numel) * block_bytes

    def part(self, stored: torch.Tensor, span: slice) -> torch.Tensor:
        """The elements ``span``, which begins with a block, of a stored state (1-D, ``dtype``)."""
        # Example: elements 256..600 of an int8 state are blocks 1 and 2, the last one padded: bytes 260..780.
        itemsize = self.dtype.itemsize
        return stored[self.num_bytes(span.start) // itemsize : self.num_bytes(span.stop) // itemsize]
