"""Gives all ranks the weights of rank 0 before training."""

from __future__ import annotations

import zlib

from torch import nn

from infinity.distributed.collectives import Ranks


def share_weights(model: nn.Module, ranks: Ranks) -> None:
    """Copy parameters and buffers of rank 0 to all ranks, as DDP does.

    Raises:
        RankError: names, shapes, dtypes or trained parameters differ between ranks. Nothing has been changed then.
    """
    if ranks.num == 1:
        return
    tensors = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        tensors.setdefault(name, buffer)  # type: ignore[arg-type]
    # The checksum is part of the collective's label, and ranks compare labels. So a rank with another model gets an
    # error here, and not a hang or a wrong shape in one of the broadcasts below.
    facts = [f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors.items()]
    ranks.all_gather_ints(
        f"infinity.initialize with a model of {len(tensors)} tensors, {zlib.crc32(repr(facts).encode()):08x}"
    )
    for name, tensor in tensors.items():
        ranks.broadcast_from(f"infinity.initialize, '{name}'", 0, tensor.data)
