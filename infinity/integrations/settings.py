"""Merges a library's arguments into a config: they fill in what the config leaves open, and must not contradict it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infinity.config import ConfigSource, InfinityConfig, load_config
from infinity.config.load import read_source
from infinity.config.reading import tidy
from infinity.config.schema.block import Findings
from infinity.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A value that both the config and a library's argument can set.

    Attributes:
        key: of the config, dotted.
        value: of the argument.
        argument: its name, for messages.
        is_always: use it also if the config lacks the key; otherwise only in place of "auto".
        must_match: whether another value in the config is an error.
    """

    key: str
    value: Any
    argument: str
    is_always: bool = False
    must_match: bool = True


GRADIENTS_STAY = Setting("infinity.update", "deferred", "update", is_always=True, must_match=False)
"""For libraries whose hooks may read gradients before a step: no update in backward may use them up."""


def agreed(source: ConfigSource, settings: Iterable[Setting], *, drops: Iterable[str] = ()) -> InfinityConfig:
    """The config, with the library's values in place of each "auto".

    Args:
        source: as for `infinity.load_config`.
        drops: top-level keys to remove, because the library does what they say.

    Raises:
        ConfigError: config and library contradict each other, with all keys; or as `infinity.load_config`.
    """
    raw = read_source(source)
    findings = Findings()
    given = tidy(raw, findings)
    fills: dict[str, Any] = {}
    conflicts = []
    for setting in settings:
        value = _look_up(given, setting.key)
        if setting.key in findings.auto or (value is None and setting.is_always):
            fills[setting.key] = setting.value
        elif value is not None and setting.must_match and not _same(value, setting.value):
            conflicts.append((setting, value))
    if conflicts:
        described = ", ".join(
            f"'{each.key}' is {value!r} and {each.argument} {each.value!r}" for each, value in conflicts
        )
        raise ConfigError(
            f'config and arguments contradict each other: {described}. Set them alike, or the key to "auto", which takes '
            "the argument's value",
            key=conflicts[0][0].key,
        )
    dropped = tuple(drops)
    kept = {key: value for key, value in fills.items() if key.partition(".")[0] not in dropped}
    return load_config(dict(raw), overrides=kept | dict.fromkeys(dropped))


def refuse_second(config: InfinityConfig, key: str, other: str) -> None:
    """Check that the config has no "optimizer" or "scheduler" if the script has made one.

    Args:
        key: which of the two.
        other: describes the script's, for the message.

    Raises:
        ConfigError: both have one.
    """
    section = getattr(config, key)
    if section is not None:
        raise ConfigError(
            f"the config names the {key} {section.type}, and {other}. Take '{key}' out of the config: the script's is the one "
            "to train with",
            key=key,
        )


def has_block(source: ConfigSource, name: str) -> bool:
    """Whether the config has a block of this name."""
    return name in tidy(read_source(source), Findings())


def _look_up(values: Mapping[str, Any], dotted: str) -> Any:
    found: Any = values
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, list | tuple):
        return len(given) == len(wanted) and all(_same(*pair) for pair in zip(given, wanted, strict=True))
    if isinstance(given, bool) or isinstance(wanted, bool) or wanted is None:
        return given is wanted
    try:
        # JSON may have 5e-05, "5e-5" or 1 where the library has 5e-5 or 1.0.
        return float(given) == float(wanted)
    except (TypeError, ValueError):
        return str(given) == str(wanted)
