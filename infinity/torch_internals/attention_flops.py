"""Operations of attention kernels that torch's own counter has no formula for: those of CPUs.

Without an entry here such a kernel counts as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_NAMES = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def attention_formulas() -> dict[Any, Any]:
    """Operation -> floating-point operations by the shapes of query, key and value: products by q·k and by weights·v."""
    from torch.utils.flop_counter import flop_registry

    found = [getattr(torch.ops.aten, name) for name in _NAMES if hasattr(torch.ops.aten, name)]
    return {each: _attention for each in found if each not in flop_registry}
