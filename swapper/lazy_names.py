"""Names of a package that are imported when they are first used (PEP 562), so that importing the package is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package. Submodules are imported at their first use, too.

    Args:
        homes: maps each name to the module that has it, to ``module:other_name``, or to ``module:`` for the module itself.
    """

    def find(name: str) -> Any:
        if name in homes:
            module, colon, attribute = homes[name].partition(":")
            value = _imported(module, attribute if colon else name, f"{package}.{name}")
        elif _is_submodule(package, name):
            value = _imported(f"{package}.{name}", "", f"{package}.{name}")
        else:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    def names() -> list[str]:
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return find, names


def _imported(module: str, attribute: str, wanted: str) -> Any:
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except AttributeError as error:  # `hasattr` and `from package import name` would hide it
        raise ImportError(f"{wanted} cannot be imported: {error}") from error


def _is_submodule(package: str, name: str) -> bool:
    folder = Path(sys.modules[package].__file__ or "").parent
    return not name.startswith("_") and PathFinder.find_spec(f"{package}.{name}", [str(folder)]) is not None
