"""The settings that the measurement speaks for, as the block of a config, with the reason for each value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infinity.config import IOSection, load_config
from infinity.errors import ConfigError
from infinity.io_profile.grid import WORKLOADS, is_large, size_words
from infinity.io_profile.results import EQUAL, Results
from swapper.measure.io_setting import IOSetting, Workload

_WEIGHTS = {Workload.READ: 1, Workload.WRITE: 1, Workload.MIXED: 2}
_PREFERENCE = ("threads", "uring", "aiofiles")
"""Among equals: the one that needs least from the machine."""
_PAGE_PER_RECORD = 18 / 12
"""A page holds, besides what is stored of a parameter, its gradient and its model weight."""

_LONGEST_REQUEST = 4 << 20
"""Pages and records, the engine's transfers, are seldom longer; more in one request would only stand in the config."""

Block = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Advice:
    """One setting for everything, how to write it, and why."""

    setting: IOSetting
    block: Block
    reasons: tuple[tuple[str, str], ...]
    """(dotted key, sentence)"""
    default_share: float | None
    """What a config that says nothing reaches of it, 1.0 if it is the same; None if that was not measured."""


def default_setting() -> IOSetting:
    """What the engine does when its config says nothing."""
    io = _io_of({})
    return IOSetting("threads", io.request_bytes, io.num_threads, io.max_inflight)


def block_for(setting: IOSetting, *, is_direct: bool) -> Block:
    """The config that makes the engine work like `setting`. A queue's depth counts for each thread."""
    return {
        "aio": {
            "block_size": setting.request_bytes,
            "queue_depth": setting.max_inflight // setting.num_threads,
            "intra_op_parallelism": setting.num_threads,
        },
        "infinity": {"io_backend": setting.backend, "direct_io": is_direct, "page_bytes": "auto"},
    }


def reproduces(block: Block, setting: IOSetting) -> bool:
    """Whether the engine, given this block, works exactly like the setting that was measured."""
    try:
        io = _io_of(block)
    except ConfigError:
        return False
    measured = (setting.backend, setting.request_bytes, setting.num_threads, setting.max_inflight)
    return (io.backend, io.request_bytes, io.num_threads, io.max_inflight) == measured


def _io_of(block: Block) -> IOSection:
    """What the engine makes of a block. Every config has to name a batch size."""
    return load_config({"train_micro_batch_size_per_gpu": 1, **block}, check_storage=False).io


def advise(results: Results, *, is_direct: bool) -> Advice | None:
    """The setting that is best over reads, writes and, counted twice, their mix; None if nothing was measured.

    Among settings within 5 % of the best: the engine's default, else the backend that needs least from the machine, with
    the fewest bytes in flight.
    """
    scores = {
        setting: score
        for setting in results.settings
        if is_large(setting.request_bytes, results.request_sizes)
        and reproduces(block_for(setting, is_direct=is_direct), setting)
        and (score := _score(results, setting)) is not None
    }
    if not scores:
        return None
    useful = [setting for setting in scores if setting.request_bytes <= _LONGEST_REQUEST] or list(scores)
    best = max(scores[setting] for setting in useful)
    default = default_setting()
    equals = [setting for setting in useful if scores[setting] >= best * (1 - EQUAL)]
    chosen = min(
        equals,
        key=lambda each: (each != default, _PREFERENCE.index(each.backend), each.bytes_inflight, -scores[each]),
    )
    block = block_for(chosen, is_direct=is_direct)
    reasons = tuple(_reasons(results, chosen, scores, is_direct=is_direct))
    share = 1.0 if chosen == default else scores[default] / scores[chosen] if default in scores else None
    return Advice(chosen, block, reasons, share)


def _score(results: Results, setting: IOSetting) -> float | None:
    """1.0 for a setting that is the fastest at everything."""
    total = 0.0
    for workload, weight in _WEIGHTS.items():
        rate = results.rate(setting, workload)
        if rate is None:
            return None
        fastest = max(results.rate(other, workload) or 0.0 for other in results.settings)
        total += weight * rate / fastest
    return total / sum(_WEIGHTS.values())


def _reasons(
    results: Results, chosen: IOSetting, scores: dict[IOSetting, float], *, is_direct: bool
) -> list[tuple[str, str]]:
    rates = ", ".join(f"{workload.value} {(results.rate(chosen, workload) or 0) / 1e9:.2f}" for workload in WORKLOADS)
    fastest = max(scores, key=lambda each: scores[each]).backend
    why = (
        "the fastest"
        if fastest == chosen.backend
        else (f"within {100 * EQUAL:.0f} % of {fastest}, and needs less from the machine")
    )
    missing = "".join(f"; {name} cannot be used here" for name, reason in results.backends.items() if reason)
    too_long = "; longer ones only pay with pages that large" if max(results.request_sizes) > _LONGEST_REQUEST else ""
    depth = chosen.max_inflight // chosen.num_threads
    depths = _others(scores, chosen, lambda each: each.num_inflight)
    if chosen.has_threads:
        threads = f"each has one request under way: {chosen.num_inflight} in flight{depths}"
        queue = f"per thread: one under way and {depth - 1} waiting, so that no thread waits for its next"
    else:
        threads = "the least; io_uring itself needs none of them"
        queue = f"per thread: {depth} x {chosen.num_threads} = {chosen.max_inflight} in flight{depths}"
    sizes = _others(scores, chosen, lambda each: each.request_bytes, size_words)
    page = size_words(round(chosen.request_bytes * _PAGE_PER_RECORD))
    return [
        ("aio.block_size", f"{size_words(chosen.request_bytes)}: GB/s {rates}{sizes}{too_long}"),
        ("aio.queue_depth", queue),
        ("aio.intra_op_parallelism", threads),
        ("infinity.io_backend", f"{why}{_others(scores, chosen, lambda each: each.backend)}{missing}"),
        (
            "infinity.direct_io",
            "the file system takes O_DIRECT" if is_direct else "no O_DIRECT here: bytes go through the page cache",
        ),
        (
            "infinity.page_bytes",
            f"from the model and the memory budget; a number of your own should be {page} or more, else requests of "
            "optimizer state are shorter than the block size",
        ),
    ]


def _others(
    scores: dict[IOSetting, float],
    chosen: IOSetting,
    value: Callable[[IOSetting], Any],
    words: Callable[[Any], str] = str,
) -> str:
    """What the best setting of every other value of one quantity would give."""
    best: dict[Any, float] = {}
    for setting, score in scores.items():
        if value(setting) != value(chosen):
            best[value(setting)] = max(score, best.get(value(setting), 0.0))
    parts = [f"{words(each)}: {100 * (score / scores[chosen] - 1):+.0f} %" for each, score in sorted(best.items())]
    return f" ({', '.join(parts)})" if parts else ""
