"""Turns a raw dict into a validated `RootBlock`, and collects findings on the way.

First overrides replace values, by dotted key (`overridden`). Then three passes, each knowing dotted paths: names (unknown
keys, other spellings and older forms, "auto", null, comments), types (by pydantic), and rules (what has no effect, what is
refused).
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
from infinity.config.schema.quantities import is_auto, parse_flag
from infinity.config.schema.vocabulary import child_block, opened, suggest
from infinity.errors import ConfigError

# JSON has no comments, so files carry them as keys: "//", "# note", "_comment2", "$schema" of editors.
_COMMENT_KEY = re.compile(r"\$schema|\$?_*comments?\d*|//.*|#.*", re.IGNORECASE)
# A dict that contains itself would recurse without end. The schema's blocks are nested a few levels deep.
_MOST_DEPTH = 50
_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
_OLD_FLAGS = frozenset(f"zero_optimization.{name}" for name in _OFFLOAD)
_DOTTED = re.compile(r"[a-z]\w*(\.\w+)+")


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


# ------------------------------------------------------------------------------------------------------------ overrides


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with its overrides applied, under whatever spelling the config has for each key.

    Raises:
        ConfigError: an override names a key inside something that is not a block.
    """
    # Example: raw {"zero_optimization": {"cpu_offload": true}}, override {"zero_optimization.offload_optimizer.device":
    # "nvme"}. `modernise` turns the old flag into {"offload_optimizer": {"device": "cpu"}}, and the merge replaces
    # "cpu". Without the first step both forms would be in the config, and contradict each other.
    copy: dict[str, Any] = _copied(raw)
    if overrides:
        # An override of an old flag has to replace the flag itself, before `modernise` makes a block of it.
        for dotted in _OLD_FLAGS.intersection(overrides):
            _remove(copy, dotted.split("."), RootBlock)
        copy = modernise(copy, Findings())
    for dotted, value in overrides.items():
        path = dotted.split(".")
        if value is None:
            _remove(copy, path, RootBlock)
            continue
        patch = _copied(value)
        for name in reversed(path):
            # "aio.block_size" becomes {"aio": {"block_size": value}}: the value then merges like any block.
            patch = {name: patch}
        _merge(copy, modernise(patch, Findings()), RootBlock, dotted)
    return copy


def _copied(value: Any, depth: int = 0) -> Any:
    if depth > _MOST_DEPTH:
        raise ConfigError.in_text(
            "dict",
            f"its objects are nested more than {_MOST_DEPTH} deep",
            cure="Check that none of them contains itself",
        )
    if isinstance(value, Mapping):
        return {key: _copied(item, depth + 1) for key, item in value.items()}
    # Tuples and other values are not changed by a merge, so the copy may share them.
    return [_copied(item, depth + 1) for item in value] if isinstance(value, list) else value


def _merge(target: dict[str, Any], patch: Mapping[str, Any], block: type[Block] | None, dotted: str) -> None:
    """``block``: what `target` is; None where the schema does not know its keys."""
    for name, given in patch.items():
        field = _field(block, name)
        # A block merges key by key; a value replaces the old one under every spelling, so that none contradicts it
        # later.
        value, spellings = opened(given, field), _spellings(target, name, block)
        if not spellings or not isinstance(value, Mapping) or not _holds_block(field):
            for spelling in spellings:
                del target[spelling]
            target[name] = value
            continue
        for spelling in spellings:
            # The config may say null, "auto" or `true` where the override names a key inside. Null and "auto" become
            # {}.
            there = opened(target[spelling], field)
            target[spelling] = there = {} if there is None or is_auto(there) else there
            if not isinstance(there, dict):
                raise ConfigError(f"override '{dotted}': '{spelling}' holds {there!r}, not an object", key=dotted)
            _merge(there, value, child_block(field), dotted)


def _remove(target: dict[str, Any], path: list[str], block: type[Block] | None) -> None:
    name, *rest = path
    field = _field(block, name)
    for spelling in _spellings(target, name, block):
        if not rest:
            del target[spelling]
            continue
        there = target[spelling] = opened(target[spelling], field)
        if isinstance(there, dict):
            _remove(there, rest, child_block(field))


def _spellings(target: Mapping[str, Any], name: str, block: type[Block] | None) -> list[str]:
    """Return the names under which `target` has a key: its present one, and those of `Block.renamed`."""
    renamed = {} if block is None else block.renamed
    return [key for key in target if renamed.get(key, key) == renamed.get(name, name)]


def _field(block: type[Block] | None, name: str) -> FieldInfo | None:
    return None if block is None else block.model_fields.get(block.renamed.get(name, name))


def _holds_block(field: FieldInfo | None) -> bool:
    # An unknown field counts as a block: `tidy` refuses it later with a better message than a merge could give.
    return field is None or field.annotation == Untyped or child_block(field) is not None


# ---------------------------------------------------------------------------------------------------------- older forms


def modernise(raw: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return a copy of `raw` in which `zero_optimization` has its present form.

    Keys with dots are put into their blocks, `true` becomes stage 1, and the flags `cpu_offload` and `cpu_offload_param`
    become the blocks that replaced them.
    """
    # {"zero_optimization.stage": 2, "zero_optimization": {"cpu_offload": true}} becomes
    # {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}.
    config = _undotted(raw, findings)
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        # An old form of DeepSpeed's: a switch in place of the stage.
        config["zero_optimization"] = {"stage": 1 if zero else 0}
    elif isinstance(zero, Mapping):
        config["zero_optimization"] = _modernise_zero(dict(zero), findings)
    return config


def _undotted(raw: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return a copy in which keys like "zero_optimization.stage" are in their block. TRL writes such keys."""
    config: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    for key, value in raw.items():
        # All blocks first: a dotted key replaces a value wherever it is in the file.
        (dotted if _DOTTED.fullmatch(str(key)) else config)[key] = value
    for key, value in dotted.items():
        target = config
        *blocks, name = key.split(".")
        for block in blocks:
            inner = target.get(block)
            if isinstance(inner, bool):
                inner = {"stage" if block == "zero_optimization" else "enabled": inner}
            # A copy: `raw` is the caller's dict.
            target[block] = dict(inner) if isinstance(inner, Mapping) else {}
            target = target[block]
        target[name] = value
        findings.record(key, "taken as the key of that block, in place of the value there")
    return config


def _modernise_zero(zero: dict[str, Any], findings: Findings) -> dict[str, Any]:
    if "cpu_offload_use_pin_memory" in zero:
        del zero["cpu_offload_use_pin_memory"]
        key = "zero_optimization.cpu_offload_use_pin_memory"
        findings.record(key, "no effect: host memory is pinned when there is a GPU to pin it for")
    for old, new in _OFFLOAD.items():
        value = zero.pop(old, None)
        if value is None or is_auto(value) or not _flag(f"zero_optimization.{old}", value):
            continue
        present = zero.get(new)
        if present is None or is_auto(present):
            present = {"device": "cpu"}
        if not isinstance(present, Mapping):
            continue  # whoever looks at types says what is wrong with it
        # Both forms may be given if they agree. "nvme" and `cpu_offload` do not.
        device = present.get("device", "none")
        if device != "cpu" and not is_auto(device):
            problem = f"it contradicts zero_optimization.{new}.device = {device!r}"
            raise ConfigError.value(
                f"zero_optimization.{old}", value, problem, cure=f"Remove {old}, which is deprecated"
            )
        zero[new] = {**present, "device": "cpu"}
        findings.record(f"zero_optimization.{old}", f'old form of "{new}": {{"device": "cpu"}}, taken as that')
    return zero


def _flag(key: str, value: object) -> bool:
    try:
        return parse_flag(value)
    except ValueError as error:
        raise ConfigError.value(key, value, str(error), cure="Remove it, it is deprecated") from error
