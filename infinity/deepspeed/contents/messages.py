"""Logging functions of DeepSpeed's, for scripts."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence

from infinity.distributed.process_groups import process_rank

logger = logging.getLogger("infinity.script")
"""For the script's messages. As in DeepSpeed, those of INFO and above go to stdout."""
logger.setLevel(logging.INFO)
logger.propagate = False
logger.addHandler(logging.StreamHandler(sys.stdout))

log_levels: dict[str, int] = {
    name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")
}
"""Number of each level of messages."""


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks. None, or -1 in it: on all."""
    rank = process_rank()
    if ranks is None or {rank, -1} & set(ranks):
        logger.log(level, "[Rank %d] %s", rank, message)


_once = functools.cache(log_dist)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """As `log_dist`, each message once per process."""
    _once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def warning_once(message: str) -> None:
    """Log a warning, each message once per process."""
    logger.warning(message)


def get_log_level_from_string(log_level_str: str) -> int:
    """The number of "debug", "info", "warning", "error" or "critical".

    Raises:
        ValueError: it is none of them.
    """
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"{log_level_str!r} is not a log level. Take one of {', '.join(log_levels)}")
    return log_levels[log_level_str.lower()]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of ``custom_logger``, or of `logger`, and of its handlers.

    Raises:
        ValueError: there is no such level.
    """
    level = get_log_level_from_string(log_level_str)
    (custom_logger or logger).setLevel(level)
    for handler in (custom_logger or logger).handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """The level of `logger`."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the level of `logger` is that one or a lower one.

    Raises:
        ValueError: there is no such level.
    """
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
