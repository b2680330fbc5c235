"""What can be told of a key without a config: the text under its field, what it takes, its default, and whether it has an effect.

Knows the models of the JSON as a reader sees them; `tools/config_reference.py` and ``infinity config`` print it.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from infinity.config.schema import directories, quantities
from infinity.config.schema.block import Block, NoEffect, Refused
from infinity.config.schema.vocabulary import blocks, child_block

_KINDS = {
    quantities.parse_bytes: "a size",
    quantities.parse_count: "a whole number",
    quantities.parse_rounded: "a whole number",
    quantities.parse_number: "a number",
    quantities.parse_names: "a text or a list of texts",
    quantities.parse_path: "a path",
    quantities.parse_frozen_dtype: "one of "
    + ", ".join(f'`"{name}"`' for name in quantities.FROZEN_DTYPES)
    + ", or an object",
    directories.parse_directories: "a path, an object, or a list of those",
}
_TYPES = {bool: "`true` or `false`", dict: "an object", str: "a text", int: "a whole number", float: "a number"}
_LEAST, _MOST = {"gt": "more than", "ge": "at least"}, {"lt": "less than", "le": "at most"}


def texts_of(block: type[Block]) -> dict[str, str]:
    """Field name -> the text that stands under the field in the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(block)))
    found: dict[str, str] = {}
    name = None
    for node in tree.body[0].body:  # type: ignore[attr-defined]
        if name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        name = node.target.id if is_field else None
    return found


class Key(NamedTuple):
    """What can be told of one key."""

    name: str
    """Dotted."""
    kind: str
    """What it takes."""
    default: str
    text: str
    """What it does, or why it has no effect or is refused."""
    has_effect: bool


def keys() -> Iterator[Key]:
    """Every key that holds a value, the top level first."""
    for path, block in blocks():
        texts = texts_of(block)
        for name, field in block.model_fields.items():
            if child_block(field) is None:
                text = " ".join(filter(None, [texts.get(name, ""), *rules_of(field)]))
                yield Key(path + name, kind_of(field), default_of(field, text), text, has_effect(field))


def rules_of(field: FieldInfo) -> Iterator[str]:
    """Why the key has no effect, or when it is refused, as sentences."""
    for item in field.metadata:
        if isinstance(item, NoEffect):
            yield f"{item.reason[:1].upper()}{item.reason[1:]}."
        elif isinstance(item, Refused):
            yield f"Refused when switched on: {item.reason}. {item.cure}."


def has_effect(field: FieldInfo) -> bool:
    """Whether the key is neither accepted without effect nor refused."""
    return not any(isinstance(item, NoEffect | Refused) for item in field.metadata)


def leaves(annotation: Any) -> Iterator[Any]:
    """The types and the metadata in an annotation."""
    origin = get_origin(annotation)
    yield origin if origin is dict else annotation
    yield from getattr(annotation, "__metadata__", ())
    if origin not in (Literal, dict):
        for inner in get_args(annotation):
            yield from leaves(inner)


def kind_of(field: FieldInfo) -> str:
    """What a key takes, in words, with bounds."""
    parts = [*field.metadata, *leaves(field.annotation)]
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    readers = [part.func for part in parts if isinstance(part, BeforeValidator)]
    kind = next((_KINDS[reader] for reader in readers if reader in _KINDS), None)
    kind = kind or next((_TYPES[part] for part in parts if part in _TYPES), "a value")
    items = [item for part in parts for item in getattr(part, "metadata", None) or [part]]
    bounds = [*_limits(items, _LEAST)[-1:], *_limits(items, _MOST)[:1]]
    return f"{kind}{', ' if bounds else ''}{' and '.join(bounds)}"


def _limits(items: list[Any], signs: Mapping[str, str]) -> list[str]:
    """In words, the smallest first; of two at one number "more than" is the larger, and "less than" the smaller."""
    found = [
        (getattr(item, sign, None), sign in ("gt", "le"), words) for item in items for sign, words in signs.items()
    ]
    given = sorted(each for each in found if isinstance(each[0], int | float))
    return [f"{words} {limit:g}" for limit, _, words in given]


def default_of(field: FieldInfo, text: str) -> str:
    """A key's default, in words; ``text``: what stands under its field."""
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return 'default `"auto"`' if '`"auto"`:' in text else "not set by default"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"default `{json.dumps(value if value != () else [])}`"
