"""How an element-wise optimizer state is stored: its dtype, and where its elements lie.

Pure arithmetic; must not know how values are rounded (``infinity.numerics.state_codec``) or where they are stored.

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
_LAYOUTS = {
    "fp32": (torch.float32, 1, 4),
    "bf16": (torch.bfloat16, 1, 2),
    "int8": (torch.uint8, STATE_BLOCK, STATE_BLOCK_BYTES),
    "int8_dynamic": (torch.uint8, STATE_BLOCK, STATE_BLOCK_BYTES),
}


class StateFormat(enum.Enum):
    """What a stored state is made of."""

    FP32 = "fp32"
    """The values themselves."""
    BF16 = "bf16"
    """Their upper halves, rounded up as often as keeps the mean."""
    INT8 = "int8"
    """Codes of levels between nothing and the largest value of a block, rounded in the same way."""
    INT8_DYNAMIC = "int8_dynamic"
    """The same with the levels of bitsandbytes' 8-bit optimizers, rounded to the nearest: see `infinity.numerics.dynamic_map`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor in which a state is stored."""
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
        itemsize = self.dtype.itemsize
        return stored[self.num_bytes(span.start) // itemsize : self.num_bytes(span.stop) // itemsize]
