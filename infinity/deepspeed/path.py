"""Lets scripts import modules by DeepSpeed's names: ``infinity.deepspeed.runtime.zero``, ``deepspeed.utils`` and the like.

They have no files. Each package that has such modules has `PATH` in its ``__path__``. So Python asks the finder
below, for these packages only, when no file has the name. The first such import makes all of the modules.
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
"""Not a real folder. Absolute: ``importlib.invalidate_caches()`` drops finders of relative paths."""


class _Finder:
    """The finder for `PATH`, in `sys.path_importer_cache`."""

    @staticmethod
    def find_spec(name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.endswith(".launcher.runner.__main__"):  # `python -m deepspeed.launcher.runner`
            return spec_from_file_location(name, Path(__file__).with_name("runner.py"))
        return None if name.rpartition(".")[2].startswith("__") else _modules().spec_of(name)

    @staticmethod
    def invalidate_caches() -> None:
        """importlib calls it; there is no cache."""


def relative(name: str) -> str:
    """``runtime.zero`` for ``infinity.deepspeed.runtime.zero``, and for ``deepspeed.runtime.zero`` of the stand-in."""
    return name.removeprefix("infinity.").partition(".")[2]


def explained(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``, whose errors say what to use instead of a missing name of DeepSpeed's."""

    def refuse(name: str) -> Any:
        cure = "" if name.startswith("_") else f". {_modules().why_absent(relative(f'{module}.{name}'))}"
        raise AttributeError(f"module '{module}' has no attribute '{name}'{cure}", name=name, obj=sys.modules[module])

    return refuse


def _modules() -> Any:
    """Imported late: it loads torch and the engine."""
    return importlib.import_module("infinity.deepspeed.modules")


sys.path_importer_cache[PATH] = _Finder()
