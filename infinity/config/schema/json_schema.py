"""A JSON schema of the config, for editors: made of pydantic's, with what the reader takes besides.

Pydantic's describes what the models hold; a file may also say "auto" or null, write sizes and numbers as texts, take other
spellings, and hold comments. Whatever loads fits the schema; what fits may still contradict itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from infinity.config.schema import directories, quantities
from infinity.config.schema.block import Block, Keys, Untyped
from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.reference import leaves, rules_of, texts_of
from infinity.config.schema.vocabulary import blocks, child_block

_NUMBER = {"type": "string", "pattern": r"^\s*[-+0-9.eE_]+\s*$"}
_SIZE = {"type": "string", "pattern": r"^\s*[0-9][0-9_.eE+]*\s*([KMGTkmgt]?[Ii]?[Bb]?)\s*$"}
_FLAG = {"enum": [0, 1, "true", "false", "True", "False", "on", "off", "yes", "no"]}
_PATH = {"type": "string", "minLength": 1}
_DIRECTORY = {
    "anyOf": [
        _PATH,
        {
            "type": "object",
            "properties": {
                "path": _PATH,
                "capacity": {"anyOf": [{"type": ["integer", "null"]}, _SIZE, {"const": "auto"}]},
            },
            "required": ["path"],
            "additionalProperties": False,
        },
    ]
}
_NAMES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_TAKEN: dict[Callable[..., Any], list[dict[str, Any]]] = {
    quantities.parse_bytes: [{"type": "number"}, _SIZE],
    quantities.parse_count: [_NUMBER],
    quantities.parse_number: [_NUMBER],
    quantities.parse_rounded: [{"type": "number"}, _NUMBER],
    quantities.parse_flag: [_FLAG],
    quantities.parse_names: [_NAMES],
    quantities.parse_path: [_PATH],
    directories.parse_directories: [_DIRECTORY, {"type": "array", "items": _DIRECTORY}],
}
"""What a file may write besides what the model holds, by the function that reads it."""
_READERS_OF_THEIR_OWN = {directories.parse_directories, quantities.parse_names}
"""What these make of a value has another form than the value."""
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
    definitions.pop("Directory", None)
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
    parts = [*field.metadata, *leaves(field.annotation)]
    readers = [part.func for part in parts if isinstance(part, BeforeValidator)]
    own = {key: value for key, value in of_pydantic.items() if key not in ("title", "default", "description")}
    kinds = [] if _READERS_OF_THEIR_OWN.intersection(readers) else [_bounded(each) for each in own.pop("anyOf", [own])]
    for reader in readers:
        if reader is quantities.parse_choice:
            kinds.append(_in_any_case([name for kind in kinds for name in kind.get("enum", [])]))
        else:  # one that is written for a single key may take anything: what it takes is not told here
            kinds += _TAKEN.get(reader, [{}])
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


def _in_any_case(names: Sequence[str]) -> dict[str, Any]:
    cased = ("".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in name) for name in names)
    return {"type": "string", "pattern": rf"^\s*({'|'.join(cased)})\s*$"}


def _bounded(kind: dict[str, Any]) -> dict[str, Any]:
    """Bounds that pydantic leaves in its own words where a function reads the value first."""
    return {_BOUNDS.get(key, key): value for key, value in kind.items()}
