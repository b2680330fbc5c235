"""Prints every public name with its signature and what it is: docs/reference/api.md.

    python tools/api_reference.py            # prints it
    python tools/api_reference.py --write    # puts it into docs/reference/api.md

Public are the names in `__all__` of infinity and swapper, the engine of infinity.deepspeed, and the classes of the
integrations. What is said of each is the first paragraph of its docstring, of a record's field or a constant the text that
stands under it in the source.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from pages import REFERENCE, ROOT, WIDTH, item, print_or_write, wrapped

import infinity.deepspeed
import swapper
from infinity.config.schema.json_schema import texts_of
from infinity.engine.engine import Engine

PAGE = REFERENCE / "api.md"
DEEPSPEED = ["DeepSpeedEngine", "initialize"]
INTEGRATIONS = {
    "transformers": ["InfinityTrainer", "InfinityTrainerMixin"],
    "accelerate": ["InfinityAccelerator"],
    "lightning": ["InfinityStrategy"],
}

PARTS_OF_THE_ENGINE = frozenset(
    """
    backward_together begin_run count_on counters forget_step loose make_room set_arguments num_not_held
    on_ordinary_step adopt_optimizer optimizer_step optimizer_lock optimizer_zero_grad relay rest
    """.split()  # noqa: SIM905 - read as a text
)
"""What other parts of an engine, and the integrations, call on it: no part of what users call, although Python lets them."""

# Example: "(path: 'Path', kind: 'str' = <Kind.A: 1>)" becomes "(path: Path, kind: str = Kind.A)".
_AS_WRITTEN = {
    r"(: |-> )(['\"])(.*?)\2": r"\1\3",  # annotations are texts
    r"<(\w+\.\w+): [^>]*>": r"\1",  # members of enums
    r"<class '(?:\w+\.)*(\w+)'>": r"\1",
    r"<function (?:\w+\.)*(\w+) at [^>]*>": r"\1",
}
"""What `inspect` prints of a signature -> as one would write it."""


def signature(name: str, value: Any) -> str:
    """Return a signature as in source code, on one line; the name alone if Python knows none."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    # `self` of a method that was taken from its class. A class "returns" itself, which says nothing.
    parameters = [each for each in found.parameters.values() if each.name != "self"]
    gives = found.empty if inspect.isclass(value) else found.return_annotation
    text = f"{name}{found.replace(parameters=parameters, return_annotation=gives)}"
    for printed, written in _AS_WRITTEN.items():
        text = re.sub(printed, written, text)
    return text


def text_of(value: Any) -> str:
    """Return the first paragraph of a docstring as Markdown; empty without one."""
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    plain = re.sub(r":\w+:`([^`]*)`", r"`\1`", " ".join(paragraph.split())).replace("``", "`")
    # A paragraph may end in a colon before a list; the page has the first paragraph alone.
    return plain if plain.endswith((".", ":", "?")) or not plain else f"{plain}."


@functools.cache
def _constants(package: str) -> dict[str, str]:
    """Return the texts under the constants of a package, by name."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        body = ast.parse(path.read_text()).body
        # Python keeps no text under an assignment at run time, so the source is parsed: `NAME = ...` followed by a
        # string.
        for node, following in itertools.pairwise(body):
            match node, following:
                case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split()).replace("``", "`")
    return found


def members(cls: type) -> dict[str, Any]:
    """Return the public methods and properties of a class that these packages define, by name."""
    # Their methods are the library's, which documents them.
    if cls.__module__.startswith("infinity.integrations"):
        return {}
    found: dict[str, Any] = {}
    # Mixins of ours count, base classes of torch or pydantic do not. `setdefault`: the most derived one wins.
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("infinity", "swapper"):
            for name, value in vars(base).items():
                found.setdefault(name, value)
    callables = (property, functools.cached_property, classmethod, staticmethod)
    found = {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, callables))
    }
    if issubclass(cls, Engine):
        # `DeepSpeedEngine` inherits from `Engine`, whose names are on the page already.
        inherited = set() if cls is Engine else dir(Engine)
        return {name: value for name, value in found.items() if name not in PARTS_OF_THE_ENGINE.union(inherited)}
    return found


def _member(name: str, value: Any) -> str:
    code = name
    if not isinstance(value, property | functools.cached_property):
        # A classmethod in `vars(cls)` is a descriptor; its function has the signature.
        code = signature(name, getattr(value, "__func__", value)).replace("(cls, ", "(").replace("(cls)", "()")
    return item(f"`{code}`: {text_of(value)}")


def _class(cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        texts = texts_of(cls)  # type: ignore[arg-type]
        yield ", ".join(f"`{member.name}`" for member in cls) + "." if not texts else ""
    elif is_dataclass(cls):
        texts = texts_of(cls)  # type: ignore[arg-type]
        fields = [field for base in reversed(cls.__mro__) for field in vars(base).get("__annotations__", {})]
        told = [item(f"`{field}`: {texts[field].replace('``', '`')}") for field in fields if texts.get(field)]
        untold = [f"`{field}`" for field in fields if not texts.get(field) and not field.startswith("_")]
        yield "\n".join(told)
        yield "\n".join(textwrap.wrap(f"Fields: {', '.join(untold)}.", WIDTH)) if untold else ""
    if not issubclass(cls, Exception):
        found = members(cls)
        yield "\n".join(_member(name, found[name]) for name in found)


def _code(text: str) -> str:
    # One argument a line. The pattern splits at commas before an argument's name, and not inside of brackets, as in
    # dict[str, int].
    if len(text) > 110:
        head, _, rest = text.partition("(")
        inside, _, gives = rest.rpartition(")")
        parts = re.split(r", (?=\*{0,2}\w+(?:[:=,]|$)|\*,)(?![^\[]*\])", inside)
        text = "\n".join([f"{head}(", *(f"    {part}," for part in parts), f"){gives}"])
    return f"```text\n{text}\n```"


def entry(package: str, name: str, value: Any) -> str:
    """Return the section about one name."""
    parts = [f"### `{name}`"]
    if inspect.ismodule(value):
        listed = getattr(value, "__all__", None) or [
            each for each, what in vars(value).items()
            if not each.startswith("_") and getattr(what, "__module__", "") == value.__name__
        ]  # fmt: skip
        names = ", ".join(f"`{each}`" for each in sorted(listed))
        parts.append(wrapped(f"A module: {text_of(value)} It has {names}."))
    elif inspect.isclass(value) or inspect.isroutine(value):
        # A second name of another class: the page says which.
        alias = value.__name__ != name
        is_record = inspect.isclass(value) and (is_dataclass(value) or issubclass(value, enum.Enum))
        written = signature(name, value)
        if written != name and not alias and not is_record and not getattr(value, "_is_protocol", False):
            parts.append(_code(written))
        text = f"`{value.__name__}`. {_constants(package)[name]}" if alias else text_of(value)
        parts.append(wrapped(text))
        parts += _class(value) if inspect.isclass(value) and not alias else []
    else:
        parts.append(wrapped(_constants(package).get(name, "")))
    return "\n\n".join(filter(None, parts)) + "\n"


def names() -> Iterator[tuple[str, str, Any]]:
    """Yield package or module, name and value of all public names."""
    for package in (infinity, swapper):
        for name in package.__all__:
            yield package.__name__, name, getattr(package, name)
    yield from (("infinity.deepspeed", name, getattr(infinity.deepspeed, name)) for name in DEEPSPEED)
    for library, classes in INTEGRATIONS.items():
        module = f"infinity.integrations.{library}"
        for name in classes:
            yield module, name, getattr(importlib.import_module(module), name)


def undocumented() -> Iterator[str]:
    """Yield public names, and members of public classes, without a text."""
    for package, name, value in names():
        is_described = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
        if not (text_of(value) if is_described else _constants(package.split(".")[0]).get(name)):
            yield f"{package}.{name}"
        if inspect.isclass(value):
            yield from (f"{package}.{name}.{each}" for each, member in members(value).items() if not text_of(member))


def reference() -> str:
    """Return the page. Exits if a public name has no text."""
    # A public name without a text fails here, and so in the test that compares the page.
    if missing := ", ".join(undocumented()):
        raise SystemExit(f"without a docstring: {missing}")
    parts: list[str] = []
    chapter = ""
    for package, name, value in names():
        if package != chapter:
            parts.append(f"## {package}\n")
            chapter = package
        parts.append(entry(package, name, value))
    return "\n".join(parts)


if __name__ == "__main__":
    print_or_write(__doc__, PAGE, reference)
