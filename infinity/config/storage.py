"""Directories for scratch files, as the config names them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from infinity.errors import ConfigValueError, StorageError


def resolve_directories(names: Sequence[str], *, key: str) -> tuple[Path, ...]:
    """Absolute paths, with `~` and environment variables (`$NAME`, `${NAME}`) filled in.

    Raises:
        ConfigValueError: no path is given, or it names a variable that is not set.
    """
    if not names:
        problem = 'the device is "nvme", and no directory is given'
        raise ConfigValueError(key, None, problem, cure="Name a directory on a fast local drive, or a list of them")
    return tuple(_resolve(name, key) for name in names)


def check_directories(directories: Sequence[Path], *, key: str) -> None:
    """See that scratch files can be made there, without making any.

    Raises:
        StorageError: one of them is missing, not a directory, or not writable.
    """
    for directory in directories:
        # isdir and exists never raise, also where a parent may not be entered.
        if not os.path.exists(directory):
            cure = f"Create it (mkdir -p '{directory}'), or set the key to a directory on a fast local drive"
            raise StorageError(directory, "does not exist", cure=cure, key=key)
        if not os.path.isdir(directory):
            raise StorageError(directory, "is not a directory", cure="Set the key to the directory around it", key=key)
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            cure = "Change its permissions, or set the key to a directory that you own"
            raise StorageError(directory, "is not writable", cure=cure, key=key)


def _resolve(name: str, key: str) -> Path:
    expanded = os.path.expandvars(name)
    if unset := re.search(r"\$(\w+|\{[^}]*\})", expanded):
        cure = f"Set the environment variable {unset[1].strip('{}')}, or write the directory itself"
        raise ConfigValueError(key, name, "it names an environment variable that is not set", cure=cure)
    return Path(expanded).expanduser().absolute()
