"""The command line: what is asked, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, get_args

from infinity.config.schema.quantities import parse_bytes
from infinity.numerics.state_format import StateFormat
from swapper.config import ALIGNMENT, BackendName

from . import config_file, picture
from .effort import (
    BACKENDS,
    FULL,
    LEAST_PAIRS,
    QUICK,
    Effort,
)
from .grid import LEAST_THREADS, Grid, size_words
from .model import EXAMPLE, ModelRefused, is_finite_positive, read_model
from .places import PlaceRefused, Places, look_at, round_to_alignment

_BACKENDS: tuple[BackendName, ...] = tuple(name for name in get_args(BackendName) if name != "auto")
_LARGEST_REQUEST = 1 << 30
_MOST_IN_FLIGHT = 4096
_LONGEST_SECONDS = 600.0
_TERABYTES = {"TB": 10**12, "PB": 10**15}
T = TypeVar("T")


def parse(command_line: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The options; those that shape the measurement come back as `effort`, `grid`, `places` and `backend_names`, what
    there is to say about them as `remarks`, and the model as `model_name` and `model_shapes`. Exits with 2 and a sentence
    where something cannot be done."""
    parser = _parser(description)
    arguments = parser.parse_args(command_line)
    arguments.remarks = []
    try:
        arguments.effort = _effort(arguments)
        _check_grid(arguments)
        arguments.places = _places(arguments)
        arguments.backend_names = _backends(arguments, arguments.places)
        _check_outputs(arguments)
        arguments.model_name, arguments.model_shapes = read_model(arguments.model or EXAMPLE)
    except (PlaceRefused, ModelRefused, config_file.ConfigRefused, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    return arguments


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profile_io.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("directories", type=_directory, nargs="+", metavar="DIR", help="one directory on each drive")
    add("--quick", action="store_true", help="fewer and shorter samples: under a minute")
    add("--no-fio", action="store_true", help="do not compare with fio")
    add("--fio-huge-pages", action="store_true", help="give fio's buffers huge pages, which ours always have")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--png", type=Path, metavar="FILE", help="draw throughput over request size and depth")
    add("--apply", type=Path, metavar="CONFIG", help="write the settings into this config")
    group = parser.add_argument_group("what is measured")
    add = group.add_argument
    add("--size", type=_bytes, help=f"test file in each directory (default {_words(FULL)}, quick {_words(QUICK)})")
    add("--seconds", type=_seconds, help="length of one sample, for the sweep and the comparison")
    add("--repetitions", type=_count, help=f"rounds of the sweep (default {FULL.num_repetitions})")
    add("--pairs", type=_count, help=f"pairs of the comparison with fio (default {LEAST_PAIRS})")
    add("--request-sizes", type=_list_of(_bytes), metavar="SIZES", help="e.g. 256KiB,1MiB,4MiB")
    add("--in-flight", type=_list_of(_count), metavar="NUMBERS", help="requests under way at once, e.g. 4,8,16,32")
    add("--backends", type=_list_of(_backend), metavar="NAMES", help=f"of {', '.join(_BACKENDS)}")
    group = parser.add_argument_group("what it means for training")
    add = group.add_argument
    add("--model", metavar="N", help=f"parameters (7B, 374M) or the path of a Hugging Face config (default {EXAMPLE})")
    add(
        "--state-dtype",
        choices=[form.value for form in StateFormat],
        default="fp32",
        help="infinity.state_dtype for it",
    )
    add("--tokens-per-second", type=_positive, metavar="N", help="what your device computes with the model in memory")
    add("--tbw", type=_terabytes, metavar="TB", help="what one drive is rated to take in its life, e.g. 600 or 1.2PB")
    return parser


def _words(effort: Effort) -> str:
    return size_words(effort.file_bytes)


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
    if not is_finite_positive(value):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def _seconds(text: str) -> float:
    value = _positive(text)
    if value > _LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is too long for a sample; take at most {_LONGEST_SECONDS:.0f}")
    return value


def _count(text: str) -> int:
    value = _number(text)
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= _MOST_IN_FLIGHT:
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
    def parse_list(text: str) -> list[T]:
        return list(dict.fromkeys(convert(item.strip()) for item in text.split(",")))

    return parse_list


# ------------------------------------------------------------------------------------------------------- together


def _effort(arguments: argparse.Namespace) -> Effort:
    effort = QUICK if arguments.quick else FULL
    if arguments.size is not None:
        effort = replace(effort, file_bytes=_aligned(arguments, "--size", arguments.size))
    if arguments.seconds is not None:
        effort = replace(effort, sample_seconds=arguments.seconds, pair_seconds=arguments.seconds)
    if arguments.repetitions is not None:
        effort = replace(effort, num_repetitions=arguments.repetitions)
    if arguments.pairs is not None:
        effort = replace(effort, num_pairs=arguments.pairs)
        if arguments.pairs < LEAST_PAIRS:
            arguments.remarks.append(f"--pairs {arguments.pairs}: fewer than {LEAST_PAIRS} leave the interval wide")
    if arguments.request_sizes is not None:
        sizes = [_aligned(arguments, "--request-sizes", size) for size in arguments.request_sizes]
        if max(sizes) > _LARGEST_REQUEST:
            raise argparse.ArgumentTypeError(f"--request-sizes: at most {size_words(_LARGEST_REQUEST)} can be measured")
        effort = replace(effort, request_sizes=tuple(dict.fromkeys(sizes)))
    if arguments.in_flight is not None:
        depths = [-(-depth // LEAST_THREADS) * LEAST_THREADS for depth in arguments.in_flight]
        if depths != arguments.in_flight:
            arguments.remarks.append(
                f"--in-flight: rounded up to multiples of {LEAST_THREADS}, the fewest threads that the engine uses"
            )
        effort = replace(effort, depths=tuple(dict.fromkeys(depths)))
    return effort


def _aligned(arguments: argparse.Namespace, option: str, num_bytes: int) -> int:
    aligned = round_to_alignment(num_bytes)
    if aligned != num_bytes:
        arguments.remarks.append(f"{option}: {num_bytes} bytes rounded up to {aligned}, a multiple of {ALIGNMENT}")
    return aligned


def _check_grid(arguments: argparse.Namespace) -> None:
    effort: Effort = arguments.effort
    arguments.grid = grid = Grid.of(effort.request_sizes, effort.depths)
    if effort.file_bytes < grid.least_file_bytes:
        asked = size_words(effort.file_bytes)
        raise argparse.ArgumentTypeError(
            f"--size {asked} is too small for requests of {size_words(max(effort.request_sizes))} and "
            f"{max(effort.depths)} in flight: --size {-(-grid.least_file_bytes // (1 << 20))}MiB works, or smaller "
            "--request-sizes or --in-flight"
        )


def _places(arguments: argparse.Namespace) -> Places:
    effort: Effort = arguments.effort
    places = look_at(arguments.directories, effort.file_bytes, arguments.grid.least_file_bytes)
    arguments.remarks += places.remarks
    return places


def _backends(arguments: argparse.Namespace, places: Places) -> tuple[BackendName, ...]:
    if arguments.backends is not None:
        return tuple(arguments.backends)
    if places.is_network:
        return ("aiofiles",)
    return BACKENDS


def _check_outputs(arguments: argparse.Namespace) -> None:
    for option, path in (("--json", arguments.json), ("--png", arguments.png)):
        if path is None:
            continue
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{option} {path} is a directory; name a file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{option} {path}: there is no directory {path.parent}; create it first")
        if not os.access(path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{option} {path}: {path.parent} is not writable")
    if arguments.png is not None and not picture.is_available():
        raise argparse.ArgumentTypeError(f"--png: {picture.MISSING}")
    if arguments.apply is not None:
        config_file.check(arguments.apply)
