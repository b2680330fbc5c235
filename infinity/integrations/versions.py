"""Which versions of the libraries the integrations are for."""

from __future__ import annotations

import importlib.metadata
import re

from infinity.errors import LibraryVersionError


def require(library: str, least: str, extra: str) -> None:
    """Raise `LibraryVersionError` if ``library`` is not installed, or older than ``least`` ("5.0").

    ``extra`` is that of this package which brings the library.
    """
    try:
        found = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or _numbers(found) < _numbers(least):
        raise LibraryVersionError(library, found=found, least=least, extra=extra)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
