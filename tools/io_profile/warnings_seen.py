"""What the packages warn of while they are measured, kept for the report: a line in between would tear the bar."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def collected_warnings(notes: list[str]) -> Iterator[None]:
    """Appends every warning of `swapper` to `notes`, each once, instead of printing it."""
    handler = _Collector(notes)
    logger = logging.getLogger("swapper")
    was_propagating, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = was_propagating


class _Collector(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        sentence = record.getMessage()
        if sentence not in self._notes:
            self._notes.append(sentence)
