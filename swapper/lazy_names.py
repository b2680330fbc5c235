"""Imports of a package's names at their first use (PEP 562), so that importing the package is cheap."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package: they import names, and submodules, at their first use.

    The names are those that the package's file imports under ``if TYPE_CHECKING``.
    """

    def find(name: str) -> Any:
        wanted = f"{package}.{name}"
        module, attribute = _homes(package).get(name, (wanted, ""))
        if not attribute and not _is_submodule(package, name):
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = _imported(module, attribute, wanted)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    def names() -> list[str]:
        module = sys.modules[package]
        return sorted({*vars(module), *module.__all__})

    return find, names


@functools.cache
def _homes(package: str) -> dict[str, tuple[str, str]]:
    """Each name -> the module that has it, and its name there."""
    # From the source, so that type checkers and this module read the same list. The loader also reads a zipped package.
    loader: Any = getattr(sys.modules[package].__spec__, "loader", None)
    tree = ast.parse(loader.get_source(package))
    imports = (node for block in tree.body if isinstance(block, ast.If) for node in block.body)
    return {
        each.asname or each.name: (node.module or "", each.name)
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }


def _imported(module: str, attribute: str, wanted: str) -> Any:
    try:
        found = importlib.import_module(module)
        if not attribute or hasattr(found, attribute):
            return getattr(found, attribute) if attribute else found
        return importlib.import_module(f"{module}.{attribute}")
    except AttributeError as error:  # `hasattr` and `from package import name` would hide it
        raise ImportError(f"{wanted} cannot be imported: {error}") from error


def _is_submodule(package: str, name: str) -> bool:
    folder = Path(sys.modules[package].__file__ or "").parent
    return not name.startswith("_") and PathFinder.find_spec(f"{package}.{name}", [str(folder)]) is not None
