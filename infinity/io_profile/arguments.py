"""The command line: what is asked, checked before anything is measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from infinity.io_profile.grid import BACKENDS, FULL, LEAST_PAIRS, LEAST_THREADS, MIB, QUICK, Effort, size_words
from infinity.io_profile.places import PlaceRefused, Places, look_at
from swapper.config import ALIGNMENT, BackendName

if TYPE_CHECKING:
    from torch import nn

CHOICES: tuple[BackendName, ...] = tuple(name for name in get_args(BackendName) if name != "auto")
EXAMPLE = "7B"
"""The model that is planned for unless `--model` names another one."""
_LARGEST_REQUEST = 1 << 30
_MOST_IN_FLIGHT = 4096
_LONGEST_SECONDS = 600.0
_TERABYTES = {"TB": 10**12, "PB": 10**15}
STDOUT = Path("-")
"""For a file that is none."""
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """The options (`json`, `png`, `tbw` in bytes, ... under their own names in `options`), and what follows from them."""

    options: SimpleNamespace
    effort: Effort
    places: Places
    backends: tuple[BackendName, ...]
    remarks: list[str]
    """What there is to say about all that, in sentences."""
    model_name: str
    model: nn.Module
    """Shapes without data."""


def ask(**given: Any) -> Asked:
    """Check the options together, and with the machine.

    Raises:
        click.UsageError: something cannot be done.
    """
    from infinity.io_profile import config_file, picture  # here, since `--help` imports this file for its options
    from infinity.io_profile.model import ModelRefused, read_model

    options = SimpleNamespace(**given)
    remarks: list[str] = []
    try:
        effort = _effort(options, remarks)
        places = look_at(options.directories, effort.file_bytes, effort.least_file_bytes)
        default: tuple[BackendName, ...] = ("aiofiles",) if places.is_network else BACKENDS
        if options.png is not None and not picture.is_available():
            raise click.UsageError(f"--png: {picture.MISSING}")
        if options.apply is not None:
            config_file.check(options.apply)
        backends = tuple(options.backends or default)
        return Asked(options, effort, places, backends, remarks + places.remarks, *read_model(options.model or EXAMPLE))
    except (PlaceRefused, ModelRefused, config_file.ConfigRefused) as error:
        raise click.UsageError(str(error)) from None


# ---------------------------------------------------------------------------------------------------- single values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no number") from None


def positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise click.BadParameter(f"{text} must be a number above 0")
    return value


def seconds(text: str) -> float:
    value = positive(text)
    if value > _LONGEST_SECONDS:
        raise click.BadParameter(f"{text} is too long for a sample; take at most {_LONGEST_SECONDS:.0f}")
    return value


def count(text: str) -> int:
    value = _number(text)
    if not 1 <= value <= _MOST_IN_FLIGHT or value != int(value):
        raise click.BadParameter(f"{text} must be a whole number from 1 to {_MOST_IN_FLIGHT}")
    return int(value)


def terabytes(text: str) -> float:
    """In bytes. A bare number counts terabytes, as data sheets do."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(TB|PB)?\s*", text, re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{text!r} must be a number of terabytes, such as 600, 600TB or 1.2PB")
    return positive(match[1]) * _TERABYTES[(match[2] or "TB").upper()]


def list_of(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: list(dict.fromkeys(convert(item.strip()) for item in text.split(",")))


# ------------------------------------------------------------------------------------------------------- together


def _effort(options: SimpleNamespace, remarks: list[str]) -> Effort:
    def aligned(option: str, num_bytes: int) -> int:
        rounded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if rounded != num_bytes:
            remarks.append(f"{option}: {num_bytes} bytes rounded up to {rounded}, a multiple of {ALIGNMENT}")
        return rounded

    given: dict[str, Any] = {
        "file_bytes": options.size and aligned("--size", options.size),
        "sample_seconds": options.seconds,
        "pair_seconds": options.seconds,
        "num_repetitions": options.repetitions,
        "num_pairs": options.pairs,
    }
    effort = replace(QUICK if options.quick else FULL, **{name: value for name, value in given.items() if value})
    if effort.num_pairs < LEAST_PAIRS:
        remarks.append(f"--pairs {options.pairs}: fewer than {LEAST_PAIRS} leave the interval wide")
    if options.request_sizes is not None:
        sizes = [aligned("--request-sizes", size) for size in options.request_sizes]
        if max(sizes) > _LARGEST_REQUEST:
            raise click.UsageError(f"--request-sizes: at most {size_words(_LARGEST_REQUEST)} can be measured")
        effort = replace(effort, request_sizes=tuple(dict.fromkeys(sizes)))
    if options.in_flight is not None:
        depths = [-(-depth // LEAST_THREADS) * LEAST_THREADS for depth in options.in_flight]
        if depths != options.in_flight:
            words = f"rounded up to multiples of {LEAST_THREADS}, the fewest threads that the engine uses"
            remarks.append(f"--in-flight: {words}")
        effort = replace(effort, depths=tuple(dict.fromkeys(depths)))
    if effort.file_bytes < effort.least_file_bytes:
        requests = f"requests of {size_words(max(effort.request_sizes))} and {max(effort.depths)} in flight"
        raise click.UsageError(
            f"--size {size_words(effort.file_bytes)} is too small for {requests}: --size "
            f"{-(-effort.least_file_bytes // MIB)}MiB works, or smaller --request-sizes or --in-flight"
        )
    return effort
