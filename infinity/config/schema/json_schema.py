"""A JSON schema of the config, for editors: made of pydantic's, with what the reader takes besides.

Pydantic's describes what the models hold; a file may also say "auto" or null, write sizes and numbers as texts, take other
spellings, and hold comments. Whatever loads fits the schema; what fits may still contradict itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from infinity.config.schema import quantities
from infinity.config.schema.block import Block, Keys, Untyped
from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.reference import leaves, rules_of, texts_of
from infinity.config.schema.vocabulary import blocks, child_block

_NUMBER = {"type": "string", "pattern": r"^\s*[-+]?[0-9.][-+0-9.eE_]*\s*([KMGTkmgt]?[Ii]?[Bb]?)\s*$"}
_FLAG = {"enum": [0, 1, "true", "false", "True", "False", "on", "off", "yes", "no"]}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_COMMENTS = r"^(\$schema|\$?_*([cC][oO][mM][mM][eE][nN][tT])[sS]?[0-9]*|//.*|#.*)$"
_DOTTED = r"^[a-z]\w*(\.\w+)+$"
_OLD = ("cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory")


def json_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a whole config, as plain values."""
    schema = RootBlock.model_json_schema()
    definitions = schema["$defs"]
    for path, block in blocks():
        found = schema if not path else definitions[block.__name__]
        found["properties"] = _properties(block, found["properties"])
        found["patternProperties"] = {_COMMENTS: {}}
        found.pop("title", None)
    schema["patternProperties"][_DOTTED] = {"description": "The key of that block, in place of the value there."}
    zero = definitions["ZeroBlock"]["properties"]
    zero.update({name: {"description": "An older form of the offload blocks.", "deprecated": True} for name in _OLD})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of infinity-offload, which is DeepSpeed's with a block `infinity`",
        **schema,
    }


def _properties(block: type[Block], of_pydantic: dict[str, Any]) -> dict[str, Any]:
    texts = texts_of(block)
    found = {}
    for name, field in block.model_fields.items():
        made = _property(field, of_pydantic[name])
        if text := " ".join(filter(None, [texts.get(name, ""), *rules_of(field)])):
            made["description"] = text
        found[name] = made
    for old, new in block.renamed.items():
        found[old] = {**found[new], "description": f"Another name of `{new}`.", "deprecated": True}
    return found


def _property(field: FieldInfo, of_pydantic: dict[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in of_pydantic.items() if key not in ("title", "default", "description")}
    kinds = [taken for kind in own.pop("anyOf", [own]) for taken in _taken(_bounded(kind))]
    readers = [part.func for part in (*field.metadata, *leaves(field.annotation)) if isinstance(part, BeforeValidator)]
    own_forms = (quantities.parse_names, quantities.parse_frozen_dtype)
    if any(reader.__module__ != quantities.__name__ or reader in own_forms for reader in readers):
        kinds.append({})  # what one takes that is written for a few keys is not told here
    child = child_block(field)
    if field.annotation == Untyped or (
        child is not None and ("enabled" in child.model_fields or "stage" in child.model_fields)
    ):
        kinds.append({"type": "boolean"})
    if any(isinstance(item, Keys) for item in field.metadata):
        names = next(item.names for item in field.metadata if isinstance(item, Keys))
        for kind in kinds:
            if kind.get("type") == "object":
                kind.update(properties={name: {} for name in names}, patternProperties={_COMMENTS: {}})
                kind["additionalProperties"] = False
    kinds += [{"const": "auto"}, {"type": "null"}]
    made: dict[str, Any] = {"anyOf": [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]}
    if isinstance(field.default, bool | int | float | str):
        made["default"] = field.default
    return made


def _taken(kind: dict[str, Any]) -> list[dict[str, Any]]:
    """What a file may write for what the model holds."""
    if kind.get("type") == "string" and "enum" in kind:
        return [kind, _in_any_case(kind["enum"])]
    of_type = {"integer": [{**kind, "type": "number"}, _NUMBER], "number": [kind, _NUMBER], "boolean": [kind, _FLAG]}
    return of_type.get(kind.get("type", ""), [kind])


def _in_any_case(names: Sequence[str]) -> dict[str, Any]:
    cased = ("".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in name) for name in names)
    return {"type": "string", "pattern": rf"^\s*({'|'.join(cased)})\s*$"}


def _bounded(kind: dict[str, Any]) -> dict[str, Any]:
    """Bounds that pydantic leaves in its own words where a function reads the value first."""
    return {_BOUNDS.get(key, key): value for key, value in kind.items()}
