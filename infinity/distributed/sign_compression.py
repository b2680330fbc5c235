"""The mean over all ranks, one bit per element: signs and a scale, and what they leave out is added the next time.

[Note: in two steps] As 1-bit Adam does it (arXiv 2102.02888, section 4.2). Each rank adds what its last signs have left out to
its values, and sends of them the signs, and the root of their mean square: to each rank a part, as a server. The server takes the
mean of what it got, adds what its own last signs have left out, and sends signs and scale of that to all. So each element
crosses twice, as in an exchange of fp32, with one bit in place of 32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from infinity.distributed.collectives import Ranks

_SCALE_BYTES = 4


@dataclass(frozen=True)
class ErrorFeedback:
    """What the signs of one tensor have left out so far, fp32, 1-D: zeros at first.

    Attributes:
        worker: of this rank's values, as many as there are.
        server: of the part of the mean that this rank computes; see `server_numel`.
    """

    worker: torch.Tensor
    server: torch.Tensor


def server_numel(numel: int, ranks: Ranks) -> int:
    """How many of ``numel`` elements this rank is the server of."""
    start, stop = _parts(numel, ranks.num)[ranks.index]
    return stop - start


def compressed_mean(
    ranks: Ranks, what: str, values: Sequence[torch.Tensor], errors: Sequence[ErrorFeedback], *, kind: str
) -> None:
    """Each of ``values`` becomes its compressed mean over all ranks, with the same bits on all.

    Args:
        ranks: all come with as many values.
        what: for messages.
        values: 1-D, fp32, on the CPU; each is compressed by itself.
        errors: of each, by the calls before; changed in place.
        kind: under which `Ranks.sent_bytes` counts it.
    """
    parts = [_parts(each.numel(), ranks.num) for each in values]
    widths = [_width(each.numel(), ranks.num) // 8 for each in values]
    sizes = [*widths, _SCALE_BYTES * len(values)]
    sent = torch.zeros((ranks.num, sum(sizes)), dtype=torch.uint8, device="cpu")
    *places, last = sent.split(sizes, dim=1)
    scales = torch.zeros(len(values), dtype=torch.float32, device="cpu")
    for each, left, place, scale in zip(values, errors, places, scales, strict=True):
        left.worker.add_(each)
        signs = _pack_signs(left.worker, scale)
        place.copy_(torch.nn.functional.pad(signs, (0, place.numel() - signs.numel())).view(place.shape))
    last.copy_(scales.view(torch.uint8))
    *received, last = ranks.all_to_all(what, sent, kind=kind).split(sizes, dim=1)
    received_scales = last.clone().view(torch.float32)
    own = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
    *places, last = own.split(sizes)
    for index, (of_ranks, left, place) in enumerate(zip(parts, errors, places, strict=True)):
        start, stop = of_ranks[ranks.index]
        mean = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for row, scale in zip(received[index], received_scales[:, index], strict=True):
            mean.add_(_decoded(row, stop - start, scale))
        left.server.add_(mean, alpha=1.0 / ranks.num)
        signs = _pack_signs(left.server, scales[index])
        place[: signs.numel()] = signs
    last.copy_(scales.view(torch.uint8))
    *found, last = ranks.all_gather(what, own, kind=kind).split(sizes, dim=1)
    found_scales = last.clone().view(torch.float32)
    for index, (each, of_ranks) in enumerate(zip(values, parts, strict=True)):
        for row, scale, (start, stop) in zip(found[index], found_scales[:, index], of_ranks, strict=True):
            each[start:stop] = _decoded(row, stop - start, scale)


def _width(numel: int, num: int) -> int:
    """Elements of the longest part: whole bytes of signs."""
    return -(-numel // (8 * num)) * 8


def _parts(numel: int, num: int) -> list[tuple[int, int]]:
    width = _width(numel, num)
    return [(min(rank * width, numel), min((rank + 1) * width, numel)) for rank in range(num)]


def _pack_signs(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Signs of ``values``, packed (uint8), whose scale is put into ``scale``; ``values`` become what the two leave out."""
    if not values.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    scale.copy_(torch.linalg.vector_norm(values) / math.sqrt(values.numel()))
    is_positive = values >= 0
    values.add_(torch.where(is_positive, -scale, scale))
    return torch.from_numpy(numpy.packbits(is_positive.numpy()))


def _decoded(signs: torch.Tensor, numel: int, scale: torch.Tensor) -> torch.Tensor:
    is_positive = torch.from_numpy(numpy.unpackbits(signs.numpy(), count=numel)).bool()
    return torch.where(is_positive, scale, -scale)
