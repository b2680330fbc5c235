"""All ranks begin with the same model: that of rank 0. Knows a model and ranks; must not know what takes it over."""

from __future__ import annotations

import zlib

from torch import nn

from infinity.distributed.collectives import Ranks


def share_weights(model: nn.Module, ranks: Ranks) -> None:
    """Let parameters and buffers of all ranks become those of rank 0, as DDP does.

    Raises:
        RankError: ranks have models with other names, shapes or dtypes, or train other parameters; nothing has been changed.
    """
    if ranks.num == 1:
        return
    tensors = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        tensors.setdefault(name, buffer)  # type: ignore[arg-type]
    facts = [f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors.items()]
    ranks.all_gather_ints(
        f"infinity.initialize with a model of {len(tensors)} tensors, {zlib.crc32(repr(facts).encode()):08x}"
    )
    for name, tensor in tensors.items():
        ranks.broadcast_from(f"infinity.initialize, '{name}'", 0, tensor.data)
