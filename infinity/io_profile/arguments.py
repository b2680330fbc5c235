"""The command line: what is asked, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from torch import nn

from infinity.config.schema.quantities import parse_bytes
from infinity.io_profile import config_file, picture
from infinity.io_profile.grid import BACKENDS, FULL, LEAST_PAIRS, LEAST_THREADS, MIB, QUICK, Effort, size_words
from infinity.io_profile.model import EXAMPLE, ModelRefused, read_model
from infinity.io_profile.places import PlaceRefused, Places, look_at
from infinity.numerics.state_format import StateFormat
from swapper.config import ALIGNMENT, BackendName

_BACKENDS: tuple[BackendName, ...] = tuple(name for name in get_args(BackendName) if name != "auto")
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

    options: argparse.Namespace
    effort: Effort
    places: Places
    backends: tuple[BackendName, ...]
    remarks: list[str]
    """What there is to say about all that, in sentences."""
    model_name: str
    model: nn.Module
    """Shapes without data."""


def parse(command_line: Sequence[str] | None, prog: str | None, description: str | None) -> Asked:
    """Read a command line (None: this process's). Exits with 2 and a sentence where something cannot be done."""
    parser = _parser(prog, description)
    options = parser.parse_args(command_line)
    remarks: list[str] = []
    try:
        effort = _effort(options, remarks)
        places = look_at(options.directories, effort.file_bytes, effort.least_file_bytes)
        default: tuple[BackendName, ...] = ("aiofiles",) if places.is_network else BACKENDS
        for option in ("json", "png"):
            _check_output(option, getattr(options, option))
        if options.png is not None and not picture.is_available():
            raise argparse.ArgumentTypeError(f"--png: {picture.MISSING}")
        if options.apply is not None:
            config_file.check(options.apply)
        backends = tuple(options.backends or default)
        return Asked(options, effort, places, backends, remarks + places.remarks, *read_model(options.model or EXAMPLE))
    except (PlaceRefused, ModelRefused, config_file.ConfigRefused, argparse.ArgumentTypeError) as error:
        parser.error(str(error))


def _parser(prog: str | None, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("directories", type=_directory, nargs="+", metavar="DIR", help="one directory on each drive")
    add("--quick", action="store_true", help="fewer and shorter samples: under a minute")
    add("--no-fio", action="store_true", help="do not compare with fio")
    add("--fio-huge-pages", action="store_true", help="give fio's buffers huge pages, which ours always have")
    add(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write everything that was measured; without FILE (then behind DIR) print that, and all else to stderr",
    )
    add("--png", type=Path, metavar="FILE", help="draw throughput over request size and depth")
    add("--apply", type=Path, metavar="CONFIG", help="write the settings into this config")
    add = parser.add_argument_group("what is measured").add_argument
    sizes = f"(default {size_words(FULL.file_bytes)}, quick {size_words(QUICK.file_bytes)})"
    add("--size", type=_bytes, help=f"test file in each directory {sizes}")
    add("--seconds", type=_seconds, help="length of one sample, for the sweep and the comparison")
    add("--repetitions", type=_count, help=f"rounds of the sweep (default {FULL.num_repetitions})")
    add("--pairs", type=_count, help=f"pairs of the comparison with fio (default {LEAST_PAIRS})")
    add("--request-sizes", type=_list_of(_bytes), metavar="SIZES", help="e.g. 256KiB,1MiB,4MiB")
    add("--in-flight", type=_list_of(_count), metavar="NUMBERS", help="requests under way at once, e.g. 4,8,16,32")
    add("--backends", type=_list_of(_backend), metavar="NAMES", help=f"of {', '.join(_BACKENDS)}")
    add = parser.add_argument_group("what it means for training").add_argument
    add("--model", metavar="N", help=f"parameters (7B, 374M) or the path of a Hugging Face config (default {EXAMPLE})")
    forms = [form.value for form in StateFormat]
    add("--state-dtype", choices=forms, default="fp32", help="infinity.state_dtype for it")
    add("--tokens-per-second", type=_positive, metavar="N", help="what your device computes with the model in memory")
    add("--tbw", type=_terabytes, metavar="TB", help="what one drive is rated to take in its life, e.g. 600 or 1.2PB")
    return parser


# ---------------------------------------------------------------------------------------------------- single values


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty text names no directory; . is the present one")
    return Path(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def _seconds(text: str) -> float:
    value = _positive(text)
    if value > _LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is too long for a sample; take at most {_LONGEST_SECONDS:.0f}")
    return value


def _count(text: str) -> int:
    value = _number(text)
    if not 1 <= value <= _MOST_IN_FLIGHT or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from 1 to {_MOST_IN_FLIGHT}")
    return int(value)


def _terabytes(text: str) -> float:
    """In bytes. A bare number counts terabytes, as data sheets do."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(TB|PB)?\s*", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of terabytes, such as 600, 600TB or 1.2PB")
    return _positive(match[1]) * _TERABYTES[(match[2] or "TB").upper()]


def _backend(text: str) -> BackendName:
    for name in _BACKENDS:
        if name == text:
            return name
    raise argparse.ArgumentTypeError(f"no backend is called {text!r}; choose from {', '.join(_BACKENDS)}")


def _list_of(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: list(dict.fromkeys(convert(item.strip()) for item in text.split(",")))


# ------------------------------------------------------------------------------------------------------- together


def _effort(options: argparse.Namespace, remarks: list[str]) -> Effort:
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
            raise argparse.ArgumentTypeError(f"--request-sizes: at most {size_words(_LARGEST_REQUEST)} can be measured")
        effort = replace(effort, request_sizes=tuple(dict.fromkeys(sizes)))
    if options.in_flight is not None:
        depths = [-(-depth // LEAST_THREADS) * LEAST_THREADS for depth in options.in_flight]
        if depths != options.in_flight:
            words = f"rounded up to multiples of {LEAST_THREADS}, the fewest threads that the engine uses"
            remarks.append(f"--in-flight: {words}")
        effort = replace(effort, depths=tuple(dict.fromkeys(depths)))
    if effort.file_bytes < effort.least_file_bytes:
        requests = f"requests of {size_words(max(effort.request_sizes))} and {max(effort.depths)} in flight"
        raise argparse.ArgumentTypeError(
            f"--size {size_words(effort.file_bytes)} is too small for {requests}: --size "
            f"{-(-effort.least_file_bytes // MIB)}MiB works, or smaller --request-sizes or --in-flight"
        )
    return effort


def _check_output(option: str, path: Path | None) -> None:
    if path in (None, STDOUT):
        return
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"--{option} {path} is a directory; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"--{option} {path}: there is no directory {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"--{option} {path}: {path.parent} is not writable")
