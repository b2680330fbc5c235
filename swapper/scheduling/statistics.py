"""Counters and gauges of a swapper."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot; ``after - before`` gives what happened between two of them (gauges are those of ``after``).

    Attributes:
        read_bytes: Bytes read by finished transfers, as asked for by users (bounced blocks not included).
        write_bytes: Bytes written by finished transfers.
        num_reads: Finished read transfers.
        num_writes: Finished write transfers.
        num_retries: Transfers tried again.
        num_errors: Reads and writes that failed.
        num_bounced: Transfers that were copied through other memory, because theirs was not aligned.
        read_busy_seconds: Wall time during which at least one read was at the backend.
        write_busy_seconds: Wall time during which at least one write was at the backend.
        busy_seconds: Wall time during which at least one transfer of either direction was there: the union of both.
        inflight_reads: Gauge: reads at the backend now.
        inflight_writes: Gauge: writes at the backend now.
        queued_reads: Gauge: reads not submitted completely yet.
        queued_writes: Gauge: writes not submitted completely yet.
        capacity_bytes: Gauge: size of the storage.
        free_bytes: Gauge: storage that belongs to no extent.
        is_direct: Whether transfers bypass the page cache.
    """

    read_bytes: int
    write_bytes: int
    num_reads: int
    num_writes: int
    num_retries: int
    num_errors: int
    num_bounced: int
    read_busy_seconds: float
    write_busy_seconds: float
    busy_seconds: float
    inflight_reads: int
    inflight_writes: int
    queued_reads: int
    queued_writes: int
    capacity_bytes: int
    free_bytes: int
    is_direct: bool

    @property
    def inflight(self) -> int:
        """Transfers at the backend now."""
        return self.inflight_reads + self.inflight_writes

    @property
    def queued(self) -> int:
        """Reads and writes not submitted completely yet."""
        return self.queued_reads + self.queued_writes

    def __sub__(self, before: Statistics) -> Statistics:
        """Return what happened since ``before``."""
        counters = [field.name for field in fields(self)[:_NUM_COUNTERS]]
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in counters})


_NUM_COUNTERS = 10  # the first fields of `Statistics`; the others are gauges
