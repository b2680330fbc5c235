"""How large the staging buffers for optimizer state are, and how many.

Pure arithmetic: knows bytes and elements; must not know what else shares the budget.
"""

from __future__ import annotations

from infinity.errors import ConfigError, format_bytes
from infinity.plan.sizes import Request
from infinity.units.layout import CHUNK_GRANULE

STAGING_KEY = "infinity.staging_buffer_bytes"
FEWEST_BUFFERS = 3
"""One chunk being read, one updated, one written."""
GOOD_STAGING_BYTES = 12 << 20
"""So much goes to staging buffers before anything else shares with them: each chunk costs time, however small it is."""
_MOST_BUFFERS = 16
_PREFERRED_BUFFERS = 8
_ENOUGH_STAGING_BYTES = 48 << 20
"""For all staging buffers together: more in flight makes no drive faster. All three are for up to two workers."""
_TIMES, _MOST_SHARE = (2, 4), 6
"""Larger chunks are fewer, though: so many times as much is worth a trial, if it is no more than this part of the budget."""
_GRANULE = 4096
_SMALLEST_CHUNK = 32 * CHUNK_GRANULE
_LARGEST_CHUNK = 1024 * CHUNK_GRANULE
_CHUNK_ON_DEVICE = 8192 * CHUNK_GRANULE
"""Where records rest on a device: there is no staging buffer to fill, and a kernel for each costs the host more than it
saves."""


class StagingSizes:
    """Sizes of staging buffers, each for one chunk, that are possible with a model and its config."""

    def __init__(self, request: Request, widest: int, largest_numel: int) -> None:
        """
        Args:
            request: the config's part.
            widest: the most states that a unit has per element.
            largest_numel: trainable elements of the largest unit.

        Raises:
            ConfigError: ``staging_buffer_bytes`` is too small for one chunk.
        """
        self._request = request
        self._widest = widest
        self._share = max(request.update_workers / 2, 1)
        """Beyond two, each worker needs as much again."""
        self._fewest_buffers = FEWEST_BUFFERS - 1 + request.update_workers
        self._most_buffers = int(_MOST_BUFFERS * self._share)
        self._largest_numel = max(largest_numel, CHUNK_GRANULE)  # of a model that is only evaluated: none
        self._largest_chunk = min(_LARGEST_CHUNK, self._largest_numel)
        if request.updates_whole_parameters:
            self._largest_chunk = self._largest_numel
        self._smallest_chunk = self._find_smallest_chunk()
        self.smallest_bytes = self._bytes_for(self._smallest_chunk)
        """Of one staging buffer."""

    def enough_bytes(self, *, keeps_all_records: bool) -> set[int]:
        """More for all staging buffers together brings nothing: one number or some, of which none is always the best.

        ``keeps_all_records``: nothing is read into staging buffers or written from them.
        """
        enough = int(_ENOUGH_STAGING_BYTES * self._share)
        more = [times * enough for times in _TIMES if times * enough <= self._request.budget_bytes // _MOST_SHARE]
        most_buffers = self._fewest_buffers if keeps_all_records else self._most_buffers
        return {min(each, most_buffers * self._bytes_for(self._largest_chunk)) for each in (enough, *more)}

    def cut(self, area_bytes: int, *, keeps_all_records: bool) -> tuple[int, int, int]:
        """Elements per chunk, bytes per staging buffer, number of staging buffers in ``area_bytes``; if that is 0, of the
        smallest.

        No staging buffers where records rest on a device.
        """
        chunk_numel = self._smallest_chunk
        if self._request.records_on_device:
            if self._request.staging_buffer_bytes is None:
                chunk_numel = max(chunk_numel, min(_CHUNK_ON_DEVICE, self._largest_numel))
            return chunk_numel, self._bytes_for(chunk_numel), 0
        if self._request.staging_buffer_bytes is None and area_bytes:
            number = self._fewest_buffers if keeps_all_records else int(_PREFERRED_BUFFERS * self._share)
            numel = self._numel_in(area_bytes // number)
            chunk_numel = min(max(numel, self._smallest_chunk), self._largest_chunk)
        staging_buffer_bytes = self._bytes_for(chunk_numel)
        return (
            chunk_numel,
            staging_buffer_bytes,
            max(min(area_bytes // staging_buffer_bytes, self._most_buffers), FEWEST_BUFFERS),
        )

    def _find_smallest_chunk(self) -> int:
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
