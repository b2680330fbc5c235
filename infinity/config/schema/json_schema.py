"""A JSON schema of the config, for editors, made from the models that read it; and the texts, choices and effects of keys, which
the reference page shows as well.

A file may also say "auto" or null, write sizes and numbers as texts, take other spellings, and hold comments. Whatever loads
fits the schema; what fits may still contradict itself.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from infinity.config.schema import quantities
from infinity.config.schema.block import Block, Keys, NoEffect, Refused, Untyped
from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.vocabulary import child_block

_NUMBERS: list[dict[str, Any]] = [
    {"type": "number"},
    # What `parse_bytes` and `parse_number` accept as text: "2GB", "1_000", "1e-4".
    {"type": "string", "pattern": r"^\s*[-+]?[0-9.][-+0-9.eE_]*\s*([KMGTkmgt]?[Ii]?[Bb]?)\s*$"},
]
_FLAGS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"enum": [0, 1, "true", "false", "True", "False", "on", "off", "yes", "no"]},
]
_OF_READERS: dict[Any, list[dict[str, Any]]] = {
    quantities.parse_bytes: _NUMBERS,
    quantities.parse_count: _NUMBERS,
    quantities.parse_rounded: _NUMBERS,
    quantities.parse_number: _NUMBERS,
    quantities.parse_flag: _FLAGS,
    quantities.parse_path: [{"type": "string"}],
}
"""The forms that a key accepts, by the function that parses it. Keys with other parsers accept anything."""
_OF_TYPES: dict[Any, list[dict[str, Any]]] = {str: [{"type": "string"}], int: _NUMBERS[:1]}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
# The same keys as `reading._COMMENT_KEY`: JSON schema has no flag for upper and lower case.
_COMMENTS = r"^(\$schema|\$?_*([cC][oO][mM][mM][eE][nN][tT])[sS]?[0-9]*|//.*|#.*)$"
_DOTTED = r"^[a-z]\w*(\.\w+)+$"
# Flags that `reading.modernise` rewrites. They are no fields of a model.
_OLD = ("cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory")


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a whole config, as plain values."""
    schema = _block(RootBlock)
    schema["patternProperties"][_DOTTED] = {"description": "The key of that block, in place of the value there."}
    # `_kinds` puts the block itself first, before true and false, "auto" and null.
    zero = schema["properties"]["zero_optimization"]["anyOf"][0]["properties"]
    zero.update({name: {"description": "An older form of the offload blocks.", "deprecated": True} for name in _OLD})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of infinity-offload, which is DeepSpeed's with a block `infinity`",
        **schema,
    }


def _block(block: type[Block]) -> dict[str, Any]:
    texts = texts_of(block)
    properties: dict[str, Any] = {}
    for name, field in block.model_fields.items():
        properties[name] = {"anyOf": [*_kinds(field), {"const": "auto"}, {"type": "null"}]}
        if isinstance(field.default, bool | int | float | str):
            properties[name]["default"] = field.default
        if text := " ".join(filter(None, [texts.get(name, ""), *rules_of(field)])):
            properties[name]["description"] = text
    for old, new in block.renamed.items():
        properties[old] = {**properties[new], "description": f"Another name of `{new}`.", "deprecated": True}
    return _object(properties)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    others = {"patternProperties": {_COMMENTS: {}}, "additionalProperties": False}
    return {"type": "object", "properties": properties, **others}


def _kinds(field: FieldInfo) -> list[dict[str, Any]]:
    if (child := child_block(field)) is not None:
        # `"bf16": true` and, in old files, `"zero_optimization": true`.
        is_switch = "enabled" in child.model_fields or "stage" in child.model_fields
        return [_block(child), *([{"type": "boolean"}] if is_switch else [])]
    if field.annotation == Untyped:
        names = next((item.names for item in field.metadata if isinstance(item, Keys)), None)
        return [{"type": "object"} if names is None else _object({name: {} for name in names}), {"type": "boolean"}]
    parts = [*field.metadata, *leaves(field.annotation)]
    readers = [part.func for part in parts if isinstance(part, BeforeValidator)]
    # {} in a JSON schema accepts everything: the file then loads or fails by the parser alone.
    if not all(reader in _OF_READERS or reader is quantities.parse_choice for reader in readers):
        return [{}]
    if choices := choices_of(field):
        # `parse_choice` ignores case, JSON schema cannot: "nvme" becomes [nN][vV][mM][eE].
        cased = ("".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in name) for name in choices)
        return [{"enum": choices}, {"type": "string", "pattern": rf"^\s*({'|'.join(cased)})\s*$"}]
    kinds = _OF_READERS[readers[0]] if readers else next((_OF_TYPES[part] for part in parts if part in _OF_TYPES), [{}])
    bounds = dict(_bounds(parts))
    return [kind | bounds if kind.get("type") == "number" else kind for kind in kinds]


def _bounds(parts: list[Any]) -> Iterator[tuple[str, float]]:
    for part in parts:
        for item in getattr(part, "metadata", None) or [part]:
            yield from ((word, getattr(item, name)) for name, word in _BOUNDS.items() if hasattr(item, name))


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
