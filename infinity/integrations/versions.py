"""Checks the versions of the libraries that the integrations support."""

from __future__ import annotations

import importlib.metadata
import re

from infinity.errors import LibraryError


def require(library: str, least: str, extra: str, below: str | None = None) -> None:
    """Raise `LibraryError` if ``library`` is missing, older than ``least`` ("5.0"), or not older than ``below``.

    ``extra``: the extra of this package that installs the library.
    """
    try:
        found = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        found = None
    is_new_enough = found is not None and _numbers(found) >= _numbers(least)
    is_too_new = found is not None and below is not None and _numbers(found) >= _numbers(below)
    if not is_new_enough or is_too_new:
        raise LibraryError.of_version(library, found=found, least=least, extra=extra, below=below)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
