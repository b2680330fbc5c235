"""The names under which scripts import DeepSpeed's parts: ``from infinity.deepspeed.utils import logger`` and the like.

Few of them are files. Each entry of ``contents/names.toml`` becomes a module: of `infinity.deepspeed` when a script
first uses such a name (see `infinity.deepspeed.path`), and of `deepspeed` with `infinity.as_deepspeed`. A name that
is not in the table raises an error that says what to use instead.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from infinity.deepspeed.contents import comm
from infinity.deepspeed.contents.names import REFUSED, TABLE
from infinity.deepspeed.path import PATH, explained, relative
from infinity.errors import nearest


def _content(lines: Sequence[str]) -> dict[str, Any]:
    """The names of a module and their values, as `names.toml` describes them."""
    found: dict[str, Any] = {}
    # A line is a module of `infinity` and names in it:
    #   "deepspeed.contents.comm"                      all functions and classes that it defines
    #   "errors DeepSpeedConfigError=ConfigError"      its ConfigError, under the other name
    #   "deepspeed.contents.groups **PUBLIC"           all entries of its dict PUBLIC
    for line in lines:
        where, *names = line.split()
        module = importlib.import_module(f"infinity.{where}")
        source = vars(module)
        own = (name for name, value in source.items() if getattr(value, "__module__", None) == module.__name__)
        for name in names or [name for name in own if not name.startswith("_")]:
            new, _, old = name.rpartition("=")
            found |= source[name[2:]] if name.startswith("**") else {new or old: source[old]}
    return found


_MODULES = {name: _content(lines) | TABLE["constants"].get(name, {}) for name, lines in TABLE["modules"].items()}
_OF_THE_PACKAGE = _MODULES.pop("") | {"dist": comm}
"""The names of DeepSpeed's package itself."""


def why_absent(name: str) -> str:
    """The end of an error for a name of DeepSpeed's (with dots) that does not exist here."""
    above, _, last = name.rpartition(".")
    there = {each: module for module in sorted(_MODULES, key=len, reverse=True) for each in _MODULES[module]}
    # From the most to the least precise answer: the reason for this very name, the same name in another module, a
    # similar name in this module. Then the reason for its package, a similar name anywhere, the list of modules.
    if name in REFUSED:
        return REFUSED[name]
    if last in there and there[last] != above:
        return f"It is in {there[last]}"
    own = [each for each in _MODULES.get(above, {}) if not each.startswith("_") and each.isupper() == last.isupper()]
    near = nearest(last, own)
    if near is not None:
        return f"Use instead: {above}.{near}"
    parts = name.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    cure = next((REFUSED[prefix] for prefix in prefixes if prefix in REFUSED), None)
    if cure is not None:
        return cure
    near = nearest(last, list(there))
    if near is not None:
        return f"Use instead: {there[near]}.{near}"
    return f"Of DeepSpeed's modules there are {', '.join(_MODULES)}"


class _Part(ModuleType):
    """A module without a file, made of names from the table."""

    def __init__(self, name: str, content: dict[str, Any]) -> None:
        super().__init__(name, "One of DeepSpeed's modules, as far as scripts need it.")
        vars(self).update(content, __getattr__=explained(name), __path__=[PATH])
        self.__spec__ = ModuleSpec(name, _LoaderOfExisting(), is_package=True)


class _LoaderOfExisting(Loader):
    """The loader of a module that exists already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def spec_of(name: str) -> ModuleSpec:
    """The spec of a module of the table.

    Raises:
        ModuleNotFoundError: it is not in the table; the message says what to use instead.
    """
    if name in sys.modules:
        return ModuleSpec(name, _LoaderOfExisting(), is_package=True)
    # Without `name=`: where a name is imported from a module, Python replaces the message by its own otherwise.
    raise ModuleNotFoundError(f"there is no {name} here. {why_absent(relative(name))}")


def install(package: ModuleType) -> None:
    """Add the modules of the table to ``package``, unless it has files for them."""
    for name, value in _OF_THE_PACKAGE.items():
        vars(package).setdefault(name, value)
    if PATH not in package.__path__:
        package.__path__.append(PATH)
    names = {f"{package.__name__}.{name}": content for name, content in _MODULES.items()}
    made = {name: _Part(name, content) for name, content in names.items() if name not in sys.modules}
    for name, part in made.items():
        above, _, last = name.rpartition(".")
        held = vars(made.get(above) or sys.modules[above])
        if not callable(held.get(last)):  # a function of that name stays; a module is replaced, as by an import
            held[last] = part
    sys.modules.update(made)  # last, so that another thread finds only complete modules


install(importlib.import_module("infinity.deepspeed"))
