"""Turns a raw dict into a validated `RootBlock`, and collects findings on the way.

Three passes, each knowing dotted paths: names (unknown keys, other spellings, "auto", null, comments), types (by
pydantic), and rules (what has no effect, what is refused).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from infinity.config.schema.block import Block, Findings, Keys, NoEffect, NotNull, Refused, Untyped
from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.legacy import modernise
from infinity.config.schema.quantities import is_auto, parse_flag
from infinity.config.schema.vocabulary import child_block, opened, suggest
from infinity.errors import ConfigError

# JSON has no comments, so files carry them as keys: "//", "# note", "_comment2", "$schema" of editors.
_COMMENT_KEY = re.compile(r"\$schema|\$?_*comments?\d*|//.*|#.*", re.IGNORECASE)


def tidy(raw: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """The first pass: return a dict of known keys under their present names, without "auto" and null.

    Dropped keys are recorded in `findings`.
    """
    return _tidy_block(RootBlock, modernise(raw, findings), "", findings)


def validate(tidied: Mapping[str, Any]) -> RootBlock:
    """The second pass: check types and ranges.

    Raises:
        ConfigError: names the first key that is wrong, and lists the others.
    """
    try:
        return RootBlock.model_validate(tidied)
    except ValidationError as error:
        raise _translate(error) from error


def apply_rules(block: Block, findings: Findings, path: str = "") -> None:
    """The third pass: record keys without effect in `findings`, and refuse those that cannot be ignored.

    Raises:
        ConfigError: a feature that would change the numbers is switched on.
    """
    # A block that is switched off asks for nothing: files keep whole blocks with "enabled": false.
    if not block.is_active():
        return
    for name, field in type(block).model_fields.items():
        # A default is not the user's wish: only keys that the file has are reported or refused.
        if name not in block.model_fields_set:
            continue
        value = getattr(block, name)
        for item in field.metadata:
            if isinstance(item, NoEffect | Refused):
                item.apply(path + name, value, findings)
        if isinstance(value, Block):
            apply_rules(value, findings, f"{path}{name}.")


# ---------------------------------------------------------------------------------------------------------------- names


def _tidy_block(cls: type[Block], raw: Mapping[str, Any], path: str, findings: Findings) -> dict[str, Any]:
    tidied: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in _entries(raw, path):
        # Two spellings of one key may both be given if they agree. If they differ, neither is a safe choice.
        name = cls.renamed.get(key, key)
        if name not in cls.model_fields:
            findings.unknown.append((path + key, suggest(path, key, (*cls.model_fields, *cls.renamed))))
            continue
        kept = _tidy_value(cls.model_fields[name], value, path + name, findings)
        if kept is None:
            continue
        if name in tidied and tidied[name] != kept:
            problem = f"it contradicts {path}{origins[name]} = {tidied[name]!r}, another name of the same key"
            raise ConfigError.value(path + key, value, problem, cure="Keep one of them")
        if key != name:
            findings.record(path + key, f"another name of {path}{name}, taken as that")
        tidied[name] = kept
        origins[name] = key
    return tidied


def _tidy_value(field: FieldInfo, value: object, path: str, findings: Findings) -> Any:
    """Return a value without the parts that are dropped; None if all of it is."""
    # "auto" leaves the key out, so that pydantic sets the default. `resolve` still learns of it from `findings.auto`.
    if is_auto(value):
        findings.auto.append(path)
        return None
    if value is None:
        # null means "not set" for all keys but those with `NotNull`: for gradient_clipping it would mean clipping at
        # 1.0.
        for item in field.metadata:
            if isinstance(item, NotNull):
                raise ConfigError.value(path, value, item.problem, cure=item.cure)
        return None
    value = opened(value, field)
    if not isinstance(value, Mapping):
        return value
    if (child := child_block(field)) is not None:
        return _tidy_block(child, value, f"{path}.", findings)
    if field.annotation == Untyped:
        # A block whose values nobody reads is checked for the names of its keys only, and only if the schema lists
        # them.
        known = next((item.names for item in field.metadata if isinstance(item, Keys)), None)
        return _tidy_dict(value, f"{path}.", findings, known)
    return value


def _tidy_dict(
    raw: Mapping[str, Any], path: str, findings: Findings, known: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Tidy a block without a model."""
    tidied: dict[str, Any] = {}
    for key, value in _entries(raw, path):
        if known is not None and key not in known:
            findings.unknown.append((path + key, suggest(path, key, known)))
        if is_auto(value):
            findings.auto.append(path + key)
            # Without a value the block would count as switched on (see `is_switched_off`), and be refused.
            if key == "enabled":
                tidied[key] = False
        elif isinstance(value, Mapping):
            tidied[key] = _tidy_dict(value, f"{path}{key}.", findings)
        else:
            tidied[key] = value
    return tidied


def _entries(raw: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        if not isinstance(key, str):
            raise ConfigError.value(f"{path}{key}", value, "the key is not a text", cure="Keys of a config are texts")
        if not _COMMENT_KEY.fullmatch(key):
            yield key, value


# ---------------------------------------------------------------------------------------------------------------- types


def _translate(error: ValidationError) -> ConfigError:
    problems = error.errors(include_url=False)
    # pydantic reports every problem. One gets the full sentence, the others are listed by key.
    first = problems[0]
    key, *others = [".".join(map(str, problem["loc"])) for problem in problems]
    value = None if first["type"] == "missing" else first["input"]
    also = f" (also wrong: {', '.join(map(repr, others))})" if others else ""
    problem, cure = _describe(first["type"], first["msg"], first.get("ctx", {}), value)
    return ConfigError.value(key, value, problem + also, cure=cure)


def _describe(kind: str, message: str, context: Mapping[str, Any], value: object) -> tuple[str, str]:
    # `kind` is the type of pydantic's error. Its messages name Python's types, so these are reworded for JSON.
    if kind == "value_error":
        return str(context["error"]), "Correct it"
    if kind == "missing":
        return "it is missing", "Add it, or remove the block that it belongs to"
    if kind == "literal_error":
        # The choices are only in the message, not in a list.
        # pydantic words it "'none', 'cpu' or 'nvme'".
        choices = re.findall(r"'([^']*)'", str(context["expected"]))
        near = get_close_matches(str(value), choices, n=1)
        problem = "expected one of " + ", ".join(f'"{choice}"' for choice in choices)
        return problem, f'Did you mean "{near[0]}"?' if near else "Use one of them"
    if kind in ("model_type", "dict_type"):
        return "must be an object", "Write { ... }"
    if kind == "string_type":
        return "must be a text", "Put it in double quotes"
    bounds = {"greater_than": "more than", "greater_than_equal": "at least", "less_than_equal": "at most"}
    if kind in bounds:
        limit = next(iter(context.values()))
        return f"must be {bounds[kind]} {limit}", "Correct it"
    return message, "Correct it"


def read_strictness(tidied: Mapping[str, Any]) -> bool:
    """Return `infinity.strict` of a config whose types are not checked yet."""
    block = tidied.get("infinity")
    value = block.get("strict", True) if isinstance(block, Mapping) else True
    try:
        return value != "warn" and parse_flag(value)
    except ValueError:
        return True
