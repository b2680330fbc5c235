"""Values that replace those of a config, by dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config.reading import tidy
from infinity.config.schema.block import Findings
from infinity.errors import ConfigError


def override(tidied: dict[str, Any], overrides: Mapping[str, Any], findings: Findings) -> None:
    """Change `tidied` (see `reading.tidy`) and what was found in it.

    Overrides go through the same pass of names first, so that one under a key's present name also replaces a value that
    the file gives under another.
    """
    for dotted, value in overrides.items():
        found = Findings()
        raw = value
        for name in reversed(dotted.split(".")):
            raw = {name: raw}
        patch = tidy(raw, found)
        if value is not None:
            _merge(tidied, patch, dotted)
        findings.unknown.extend(found.unknown)
        for reason, keys in found.ineffective.items():
            for key in keys:
                findings.note(key, reason)
        replaced = _leaves(patch)
        kept = [key for key in findings.auto if key not in replaced and key not in found.auto]
        findings.auto[:] = kept + found.auto
        for key in [dotted] if value is None else found.auto:
            _remove(tidied, key.split("."))


def as_written(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the config as it was given, with the overrides in their places."""
    copy: dict[str, Any] = _copied(raw)
    for dotted, value in overrides.items():
        if value is None:
            _remove(copy, dotted.split("."))
            continue
        target = copy
        *blocks, name = dotted.split(".")
        for block in blocks:
            inner = target.get(block)
            if not isinstance(inner, dict):
                inner = target[block] = {}
            target = inner
        target[name] = value
    return copy


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _merge(target: dict[str, Any], patch: Mapping[str, Any], dotted: str) -> None:
    for name, value in patch.items():
        present = target.get(name)
        if not isinstance(value, Mapping):
            target[name] = value
        elif present is None:
            target[name] = dict(value)
        elif isinstance(present, dict):
            _merge(present, value, dotted)
        else:
            raise ConfigError(f"override '{dotted}': '{name}' holds {present!r}, not an object", key=dotted)


def _remove(target: dict[str, Any], path: list[str]) -> None:
    *blocks, name = path
    for block in blocks:
        inner = target.get(block)
        if not isinstance(inner, dict):
            return
        target = inner
    target.pop(name, None)


def _leaves(patch: Mapping[str, Any], path: str = "") -> list[str]:
    found: list[str] = []
    for name, value in patch.items():
        inner = _leaves(value, f"{path}{name}.") if isinstance(value, Mapping) else []
        found.extend(inner or [path + name])
    return found
