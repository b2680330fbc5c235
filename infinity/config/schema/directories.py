"""Directories for scratch files, as the config names them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path, PurePath

from infinity.config.schema.quantities import is_auto, parse_bytes, parse_path
from infinity.errors import ConfigError, StorageError
from swapper.config import ALIGNMENT
from swapper.volumes.directory import Directory

logger = logging.getLogger(__name__)

_FIELDS = ("path", "capacity")
_CURE_OF_MISSING = "Correct the path, mount the drive, or make the parent directory yourself (mkdir -p)"


def parse_directories(value: object) -> tuple[Directory, ...]:
    """A text (or path), an object `{"path": ..., "capacity": "400GB"}`, or a list of such, always as a tuple.

    Paths are as the config has them, see `resolve_directories`.
    """
    # Raises ValueError, which pydantic turns into its error for the key: all parsers of this package do so.
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_parse_directory(item) for item in values)


def _parse_directory(value: object) -> Directory:
    if isinstance(value, Directory):
        return value
    if not isinstance(value, Mapping):
        return Directory(Path(_parse_path(value)))
    for name in value:
        if name not in _FIELDS:
            near = get_close_matches(str(name), _FIELDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else 'a directory has "path" and "capacity"'
            raise ValueError(f"a directory has no '{name}': {hint}")
    if "path" not in value:
        raise ValueError('a directory without "path"; write {"path": "/mnt/nvme", "capacity": "400GB"}')
    path = _parse_path(value["path"])
    capacity = value.get("capacity")
    if capacity is None or is_auto(capacity):
        return Directory(Path(path))
    try:
        capacity_bytes = parse_bytes(capacity)
    except ValueError as error:
        raise ValueError(f"capacity {capacity!r} of '{path}' {error}") from None
    if capacity_bytes < ALIGNMENT:
        raise ValueError(f"capacity {capacity!r} of '{path}' must be at least {ALIGNMENT} bytes")
    return Directory(Path(path), capacity_bytes)


def _parse_path(value: object) -> str:
    if not isinstance(value, str | PurePath) or not str(value):
        raise ValueError('must be a text, an object {"path": ..., "capacity": ...}, or a list of those')
    return parse_path(value)


def resolve_directories(named: Sequence[Directory], *, key: str) -> tuple[Directory, ...]:
    """Absolute paths, with `~` and environment variables (`$NAME`, `${NAME}`) filled in.

    Raises:
        ConfigError: no path is given, one is given twice, or one names a variable that is not set, or an unknown home.
    """
    if not named:
        problem = 'the device is "nvme", and no directory is given'
        raise ConfigError.value(key, None, problem, cure="Name a directory on a fast local drive, or a list of them")
    directories = tuple(replace(each, path=resolve_file(str(each.path), key=key)) for each in named)
    # Two links to one directory would put two stripes on one drive, and count its space twice.
    paths = [os.path.realpath(directory.path) for directory in directories]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError.value(key, path, "the directory is given twice", cure="Name each drive once")
    return directories


def check_capacities(one: Sequence[Directory], other: Sequence[Directory], *, key: str) -> None:
    """Check that both offload blocks give a shared directory the same capacity.

    Raises:
        ConfigError: they differ.
    """
    # Equal lists share one volume, with one capacity: see the cure below.
    if one == other:
        return
    limits = {os.path.realpath(each.path): each.capacity_bytes for each in one}
    for each in other:
        # 0 stands for "not in the other block". None means "without a limit": two of these agree.
        limit = limits.get(os.path.realpath(each.path), 0)
        if limit != 0 and (limit, each.capacity_bytes) != (None, None):
            here, there = _limit(each.capacity_bytes), _limit(limit)
            problem = f"'{each.path}' has {here} here and {there} in the other offload block"
            cure = "A capacity limits everything in the directory: give both blocks the same list of directories"
            raise ConfigError.value(key, describe_directories(other), problem, cure=cure)


def describe_directories(directories: Iterable[Directory]) -> str:
    """Return the paths, with their capacities, for messages."""
    return ", ".join(
        str(each.path) if each.capacity_bytes is None else f"{each.path} (at most {each.capacity_bytes} bytes)"
        for each in directories
    )


def _limit(capacity_bytes: int | None) -> str:
    return "no capacity" if capacity_bytes is None else f"a capacity of {capacity_bytes} bytes"


def check_directories(directories: Sequence[Path], *, key: str) -> None:
    """Check that scratch files can be made in these directories. A missing one is made later, if its parent exists.

    Raises:
        StorageError: one of them is not a directory, not writable, or missing in one that is not; or its parent is missing.
    """
    for path in directories:
        # The directory itself, or its nearest ancestor that exists, in which it would be made.
        directory = existing(path)
        # isdir and exists never raise, also where a parent may not be entered.
        if not os.path.exists(directory):
            cure = "It is a symbolic link whose target does not exist: correct it"
            raise StorageError(directory, "does not exist", cure=cure, key=key)
        if not os.path.isdir(directory):
            raise StorageError(directory, "is not a directory", cure="Set the key to the directory around it", key=key)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            cure = "Change its permissions, or set the key to a directory that you own"
            raise StorageError(directory, "is not writable", cure=cure, key=key)
        # Only the last folder is made. A path with two missing folders is misspelt, or its drive is not mounted.
        if directory not in (path, path.parent):
            raise StorageError(path, _missing_words(directory), cure=_CURE_OF_MISSING, key=key)


def _missing_words(nearest: Path) -> str:
    return f"does not exist, nor does its parent; the nearest directory that exists is '{nearest}'"


def existing(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    # `lexists` and not `exists`: a dangling link counts as existing, and the caller names it.
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def make_directories(directories: Iterable[Path]) -> list[Path]:
    """Make missing directories, but not their parents: a wrong path, or a drive that is not mounted, has none.

    Returns:
        The directories that were made, the innermost first.

    Raises:
        StorageError: it cannot be made.
    """
    made: list[Path] = []
    for directory in directories:
        is_new = not os.path.exists(directory)
        try:
            directory.mkdir(0o755, exist_ok=True)
        except FileNotFoundError as error:
            raise StorageError(directory, _missing_words(existing(directory)), cure=_CURE_OF_MISSING) from error
        except OSError as error:
            cure = "Make it yourself, or name one that exists"
            raise StorageError(directory, f"cannot be made: {error.strerror}", cure=cure) from error
        if is_new:
            # Innermost first, so that `remove_empty` can undo it in this order.
            made.insert(0, directory)
            logger.warning("directory %s did not exist and was made: is its drive mounted?", directory)
    return made


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove the directories that are empty."""
    for directory in directories:
        # ENOTEMPTY: somebody else uses it by now.
        with contextlib.suppress(OSError):
            directory.rmdir()


def resolve_file(name: str, *, key: str) -> Path:
    """Return an absolute path, with `~` and environment variables filled in. The file need not exist.

    Raises:
        ConfigError: it names a variable that is not set, or an unknown home.
    """
    # `expandvars` leaves unknown variables as they are: a path with a dollar sign would be made literally.
    expanded = os.path.expandvars(name)
    if unset := re.search(r"\$(\w+|\{[^}]*\})", expanded):
        cure = f"Set the environment variable {unset[1].strip('{}')}, or write the directory itself"
        raise ConfigError.value(key, name, "it names an environment variable that is not set", cure=cure)
    try:
        return Path(expanded).expanduser().absolute()
    except RuntimeError as error:
        cure = "Set the environment variable HOME, or write the directory itself"
        raise ConfigError.value(key, name, "it names a home directory that is not known", cure=cure) from error
