"""Values that replace those of a config, by dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from infinity.config.schema.block import Block, Findings, Untyped
from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.legacy import OLD_FLAGS, modernise
from infinity.config.schema.quantities import is_auto
from infinity.config.schema.vocabulary import child_block, opened
from infinity.errors import ConfigError

_MOST_DEPTH = 50


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config as it was given, with overrides in place of what they replace, however that is spelt there.

    Whoever reads the copy reads the config with its overrides, as often as that is.

    Raises:
        ConfigError: an override is for a key of something that is no block.
    """
    copy: dict[str, Any] = _copied(raw)
    if overrides:
        for dotted in OLD_FLAGS.intersection(overrides):
            _remove(copy, dotted.split("."), RootBlock)
        copy = modernise(copy, Findings())
    for dotted, value in overrides.items():
        path = dotted.split(".")
        if value is None:
            _remove(copy, path, RootBlock)
            continue
        patch = _copied(value)
        for name in reversed(path):
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
    return [_copied(item, depth + 1) for item in value] if isinstance(value, list) else value


def _merge(target: dict[str, Any], patch: Mapping[str, Any], block: type[Block] | None, dotted: str) -> None:
    """``block``: what `target` is; None where the schema does not know its keys."""
    for name, given in patch.items():
        field = _field(block, name)
        value, spellings = opened(given, field), _spellings(target, name, block)
        if not spellings or not isinstance(value, Mapping) or not _holds_block(field):
            for spelling in spellings:
                del target[spelling]
            target[name] = value
            continue
        for spelling in spellings:
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
    """All names under which a key is in `target`."""
    renamed = {} if block is None else block.renamed
    return [key for key in target if renamed.get(key, key) == renamed.get(name, name)]


def _field(block: type[Block] | None, name: str) -> FieldInfo | None:
    return None if block is None else block.model_fields.get(block.renamed.get(name, name))


def _holds_block(field: FieldInfo | None) -> bool:
    return field is None or field.annotation == Untyped or child_block(field) is not None
