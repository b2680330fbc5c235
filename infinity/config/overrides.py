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

# A dict that contains itself would recurse without end. The schema's blocks are nested a few levels deep.
_MOST_DEPTH = 50


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
