"""A timeline that is written to a file.

Knows where spans come from; must not know the engine, which may be gone when the file is written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from infinity.telemetry.chrome_trace import check_writable, write_trace
from infinity.telemetry.timeline import Row, Timeline
from swapper import Direction, TransferRecord

logger = logging.getLogger(__name__)
_ROW_OF = {Direction.READ: Row.READS, Direction.WRITE: Row.WRITES}


class Recording(Timeline):
    """The timeline of an engine, which is written down when asked, and at the end."""

    def __init__(self, path: Path, **options: Any) -> None:
        """``path``: the file for the end. ``options``: of `Timeline`.

        Raises:
            ConfigError: it cannot be written.
        """
        super().__init__(**options)
        check_writable(path)
        self.path = path

    def note_transfer(self, record: TransferRecord) -> None:
        """An observer of swappers."""
        self.add(
            _ROW_OF[record.direction],
            record.extent_name,
            record.began_seconds,
            record.ended_seconds,
            num_bytes=record.num_bytes,
            queued_seconds=record.queued_seconds,
        )

    def save(self, path: Path | None = None) -> None:
        """Write what has been recorded so far; to the file for the end if no other is named.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        write_trace(self, path or self.path)
        if self.num_dropped:
            logger.warning(
                "the timeline in %s begins late: its oldest %d spans were dropped, because memory for it is bounded",
                path or self.path,
                self.num_dropped,
            )

    def save_at_end(self) -> None:
        """As `save`; a file that cannot be written is no reason to lose what was trained."""
        try:
            self.save()
        except OSError as error:
            logger.error("the timeline could not be written to %s: %s", self.path, error)
