"""Reads the models of the JSON for the reference page and the JSON schema: texts, choices and effects of keys."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from infinity.config.schema.block import Block, NoEffect, Refused


def texts_of(block: type[Block]) -> dict[str, str]:
    """Return the text under each field in the source, by the name of the field."""
    # Python keeps no text under a field at run time, so it is read from the source of the class.
    tree = ast.parse(textwrap.dedent(inspect.getsource(block)))
    found: dict[str, str] = {}
    name = None
    for node in tree.body[0].body:  # type: ignore[attr-defined]
        if name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        name = node.target.id if is_field else None
    return found


def rules_of(field: FieldInfo) -> Iterator[str]:
    """Yield sentences that say why a key has no effect, or when it is refused."""
    for item in field.metadata:
        if isinstance(item, NoEffect):
            yield f"{item.reason[:1].upper()}{item.reason[1:]}."
        elif isinstance(item, Refused):
            yield f"Refused when switched on: {item.reason}. {item.cure}."


def has_effect(field: FieldInfo) -> bool:
    """Whether the key is neither accepted without effect nor refused."""
    return not any(isinstance(item, NoEffect | Refused) for item in field.metadata)


def leaves(annotation: Any) -> Iterator[Any]:
    """Yield the types and the metadata in an annotation."""
    origin = get_origin(annotation)
    # Example: Annotated[Literal["a"], reader] | None yields the union, then Annotated and reader, then the Literal.
    yield origin if origin is dict else annotation
    yield from getattr(annotation, "__metadata__", ())
    # The arguments of Literal are values, and those of dict[str, Any] describe its content.
    if origin not in (Literal, dict):
        for inner in get_args(annotation):
            yield from leaves(inner)


def choices_of(field: FieldInfo) -> list[Any]:
    """Return the values of a key with a fixed set of choices; empty for other keys."""
    parts = [*field.metadata, *leaves(field.annotation)]
    return [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
