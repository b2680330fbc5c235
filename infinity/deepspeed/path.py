"""Lets scripts import modules by DeepSpeed's names: ``infinity.deepspeed.runtime.zero``, ``deepspeed.utils`` and the like.

They have no files. `PATH` is an entry of the ``__path__`` of each package that has such modules. Python therefore asks the
finder below when no file has the name, for these packages only. It makes all of the modules at the first such import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

PATH = f"{__file__}/modules"
"""No folder. Absolute, because ``importlib.invalidate_caches()`` drops finders of relative paths."""


class _Finder:
    """What `sys.path_importer_cache` has for `PATH`."""

    @staticmethod
    def find_spec(name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.endswith(".launcher.runner.__main__"):  # what `python -m` runs of a package
            return spec_from_file_location(name, Path(__file__).with_name("runner.py"))
        return None if name.rpartition(".")[2].startswith("__") else _modules().spec_of(name)

    @staticmethod
    def invalidate_caches() -> None:
        """There are none."""


def relative(name: str) -> str:
    """``runtime.zero`` for ``infinity.deepspeed.runtime.zero``, and for ``deepspeed.runtime.zero`` of the stand-in."""
    return name.removeprefix("infinity.").partition(".")[2]


def explained(module: str) -> Callable[[str], Any]:
    """``__getattr__`` of a module of ours that scripts know as DeepSpeed's: its errors name what there is instead."""

    def refuse(name: str) -> Any:
        cure = "" if name.startswith("_") else f". {_modules().why_absent(relative(f'{module}.{name}'))}"
        raise AttributeError(f"module '{module}' has no attribute '{name}'{cure}", name=name, obj=sys.modules[module])

    return refuse


def _modules() -> Any:
    """They need torch and all of the engine, which `import infinity` does not load."""
    return importlib.import_module("infinity.deepspeed.modules")


sys.path_importer_cache[PATH] = _Finder()
