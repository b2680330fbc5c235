"""The size and number of staging buffers for optimizer state. Pure arithmetic.

A staging buffer for one chunk of AdamW with bf16 weights and remainders, in bytes per element:

    | remainder 2 | exp_avg 4 | exp_avg_sq 4 | gradient 4 | weight 2 |   = 16, so a chunk of 65,536 elements takes 1 MiB
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.errors import ConfigError, format_bytes
from infinity.plan.sizes import Request, UnitSize
from infinity.units.layout import CHUNK_GRANULE

STAGING_KEY = "infinity.staging_buffer_bytes"
FEWEST_BUFFERS = 3
"""One chunk being read, one updated, one written."""
GOOD_STAGING_BYTES = 12 << 20
"""Staging buffers get so much before anything else does: each chunk costs time, however small it is."""
# The next three are for up to two update workers, and grow with more (`_share`).
_MOST_BUFFERS = 16
_PREFERRED_BUFFERS = 8  # for the size of a chunk: several reads and writes in flight, beside the chunks in work
_ENOUGH_STAGING_BYTES = 48 << 20  # for all buffers together: more bytes in flight make no drive faster
# But larger chunks are fewer. So 2 and 4 times as much is tried as well, if that is at most a sixth of the budget.
_TIMES, _MOST_SHARE = (2, 4), 6
_GRANULE = 4096  # bytes, as of direct I/O
# Elements: 65,536 and 2,097,152. Smaller chunks cost more Python per element, larger ones leave fewer of them in
# flight.
_SMALLEST_CHUNK = 32 * CHUNK_GRANULE
_LARGEST_CHUNK = 1024 * CHUNK_GRANULE
# 16.8 M elements, for records on a GPU: no buffer has to be filled, and each chunk costs the host some launches of
# kernels.
_CHUNK_ON_DEVICE = 8192 * CHUNK_GRANULE
# Each chunk costs half a millisecond of Python beside the computing, and with eight workers, which wait for each other
# there, 1.5 (measured on 16 cores).
_CHUNK_COST_BYTES = 512 << 10


def price_of_chunks(
    units: Sequence[UnitSize], request: Request, chunk_numel: int, states_in_memory: Sequence[int]
) -> int:
    """The price of chunks in bytes of I/O, to be added to the bytes that a placement moves.

    Args:
        units, request: what is placed.
        chunk_numel, states_in_memory: see `Placement`.
    """
    # Chunks in memory cost half: nothing is read or written, but the same Python code starts their arithmetic. If they
    # were free, staging buffers would shrink where nearly all states fit: a few bytes of I/O less, and twice the
    # chunks.
    num_all = sum(-(-unit.state_numel // chunk_numel) for unit in units)
    moving = (unit.state_numel - kept for unit, kept in zip(units, states_in_memory, strict=True))
    num_chunks = (num_all + sum(-(-numel // chunk_numel) for numel in moving)) // 2
    return num_chunks * _CHUNK_COST_BYTES * max(request.update_workers * 3 // 8, 1)


class StagingSizes:
    """The possible sizes of staging buffers for a model and its config. Each buffer holds one chunk."""

    def __init__(self, request: Request, widest: int, largest_numel: int) -> None:
        """
        Args:
            request: what the config asks for.
            widest: the largest number of states per element of any unit.
            largest_numel: trainable elements of the largest unit.

        Raises:
            ConfigError: ``staging_buffer_bytes`` is too small for one chunk.
        """
        self._request = request
        self._widest = widest
        self._share = max(request.update_workers / 2, 1)
        """Factor for more than two workers: each of them needs as much again."""
        self._fewest_buffers = FEWEST_BUFFERS - 1 + request.update_workers  # each worker has one in work
        self._most_buffers = int(_MOST_BUFFERS * self._share)
        self._largest_numel = max(largest_numel, CHUNK_GRANULE)  # 0 for a model that is only evaluated
        self._largest_chunk = min(_LARGEST_CHUNK, self._largest_numel)
        if request.updates_whole_parameters:
            self._largest_chunk = self._largest_numel
        self._smallest_chunk = self._find_smallest_chunk()
        self.smallest_bytes = self._bytes_for(self._smallest_chunk)
        """Bytes of the smallest possible staging buffer."""

    def enough_bytes(self, *, keeps_all_records: bool) -> set[int]:
        """Bytes for all staging buffers together that are worth trying. No single number is always the best.

        ``keeps_all_records``: all records are in host memory, so buffers are scratch, and no I/O is in flight.
        """
        enough = int(_ENOUGH_STAGING_BYTES * self._share)
        more = [times * enough for times in _TIMES if times * enough <= self._request.budget_bytes // _MOST_SHARE]
        most_buffers = self._fewest_buffers if keeps_all_records else self._most_buffers
        return {min(each, most_buffers * self._bytes_for(self._largest_chunk)) for each in (enough, *more)}

    def cut(self, area_bytes: int, *, keeps_all_records: bool) -> tuple[int, int, int]:
        """Divide ``area_bytes``: elements per chunk, bytes per staging buffer, number of staging buffers.

        With 0 bytes: the smallest ones. For records on a GPU there are no staging buffers.
        """
        # Worked example, 16 bytes per element as above: 48 MiB / 8 buffers = 6 MiB, a chunk of 393,216 elements. With
        # the 12 MiB of a small budget, 1.5 MiB and 98,304 elements.
        chunk_numel = self._smallest_chunk
        if self._request.records_on_device:
            if self._request.staging_buffer_bytes is None:
                chunk_numel = max(chunk_numel, min(_CHUNK_ON_DEVICE, self._largest_numel))
            return chunk_numel, self._bytes_for(chunk_numel), 0
        if self._request.staging_buffer_bytes is None and area_bytes:
            number = self._fewest_buffers if keeps_all_records else int(_PREFERRED_BUFFERS * self._share)
            numel = self._numel_in(area_bytes // number)
            chunk_numel = min(max(numel, self._smallest_chunk), self._largest_chunk)
        buffer_bytes = self._bytes_for(chunk_numel)
        return chunk_numel, buffer_bytes, max(min(area_bytes // buffer_bytes, self._most_buffers), FEWEST_BUFFERS)

    def _find_smallest_chunk(self) -> int:
        # The config's staging_buffer_bytes fixes the chunk. Optimizers that mix elements need the largest unit in one
        # chunk.
        wanted, mixes = self._request.staging_buffer_bytes, self._request.updates_whole_parameters
        least = self._largest_numel if mixes else CHUNK_GRANULE
        numel = _SMALLEST_CHUNK if wanted is None else self._numel_in(wanted)
        if wanted is not None and numel < least:
            what = (
                "the optimizer updates whole parameters, and a staging buffer must hold the largest unit with all its "
                "optimizer state"
                if mixes
                else f"a staging buffer must hold {CHUNK_GRANULE} parameters with all their optimizer state"
            )
            cure = f"Set it to at least {format_bytes(self._bytes_for(least))}, or leave it out"
            raise ConfigError.value(STAGING_KEY, wanted, what, cure=cure)
        return self._largest_numel if mixes else min(numel, self._largest_numel)

    def _numel_in(self, num_bytes: int) -> int:
        return self._request.record_format.numel_in(num_bytes, self._widest, CHUNK_GRANULE)

    def _bytes_for(self, chunk_numel: int) -> int:
        num_bytes = self._request.record_format.workspace_bytes(chunk_numel, self._widest)
        return -(-num_bytes // _GRANULE) * _GRANULE
