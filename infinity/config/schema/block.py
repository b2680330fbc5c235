"""The words in which the models of the JSON are written: `Block`, and what can be said about a key besides its type.

A key with neither `NoEffect` nor `Refused` has an effect. `Refused` is for whatever would change the numbers if it were
ignored; `NoEffect` is for speed, memory and logging.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from infinity.config.schema.quantities import parse_count, parse_flag, parse_number, parse_rounded
from infinity.errors import ConfigError

Flag = Annotated[bool, BeforeValidator(parse_flag)]
Number = Annotated[float, BeforeValidator(parse_number)]
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
Elements = Annotated[int, BeforeValidator(parse_rounded), Field(ge=0)]
Untyped = dict[str, Any] | None
"""A block that is taken or refused as a whole, or whose content others know."""


class Block(BaseModel):
    """One JSON object. Field names are the JSON's keys; `renamed` maps other spellings to them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    renamed: ClassVar[Mapping[str, str]] = {}

    def is_active(self) -> bool:
        """Whether the block is switched on. What a switched-off block holds is checked for names only."""
        return bool(getattr(self, "enabled", True))


@dataclass
class Findings:
    """What reading a config brings to light besides the values."""

    unknown: list[tuple[str, str | None]] = field(default_factory=list)
    """Dotted path of each unknown key, and what may have been meant."""
    auto: list[str] = field(default_factory=list)
    """Dotted paths whose value is "auto"."""
    ineffective: dict[str, list[str]] = field(default_factory=dict)
    """For each reason the keys that have no effect because of it."""

    def record(self, key: str, reason: str) -> None:
        """Record that `key` is accepted without effect."""
        keys = self.ineffective.setdefault(reason, [])
        if key not in keys:
            keys.append(key)

    def notices(self) -> tuple[str, ...]:
        """One sentence per reason."""
        return tuple(f"{', '.join(keys)}: {reason}" for reason, keys in self.ineffective.items())


@dataclass(frozen=True)
class NoEffect:
    """The key is accepted and does nothing. Values in `silent` ask for nothing, so nothing is said about them."""

    reason: str
    silent: tuple[object, ...] = ()

    def apply(self, key: str, value: object, findings: Findings) -> None:
        """Record it for a given key of a block that is switched on."""
        if value not in self.silent and not is_switched_off(value):
            findings.record(key, self.reason)


@dataclass(frozen=True)
class Refused:
    """The key would change the numbers and is not implemented: only `allowed` values and switched-off blocks pass."""

    reason: str
    cure: str
    allowed: tuple[object, ...] = (False,)
    is_by_parts: bool = False
    """Whether the outermost `enabled` of a block switches nothing on where its parts have switches of their own."""

    def apply(self, key: str, value: object, findings: Findings) -> None:
        """Refuse it, unless it passes."""
        asked = value
        if self.is_by_parts and isinstance(value, dict):
            parts = {name: part for name, part in value.items() if name != "enabled"}
            asked = parts if _switches(parts) else value
        if value not in self.allowed and not (is_switched_off(value) or is_switched_off(asked)):
            raise ConfigError.unsupported(key, value, self.reason, cure=self.cure)


@dataclass(frozen=True)
class Keys:
    """The keys of a block of which only these names are known, because no value in it has an effect."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NotNull:
    """`null` is not "absent" here: it would be read as something else than what happens."""

    problem: str
    cure: str


def is_switched_off(value: object) -> bool:
    """Whether an untyped block asks for nothing: it is empty, or every `enabled` in it, however deep, is false.

    A block without any `enabled` is switched on: the word may be misspelt.
    """
    if not isinstance(value, dict):
        return False
    switches = _switches(value)
    return not value or (bool(switches) and all(_is_false(switch) for switch in switches))


def _switches(value: dict[str, Any]) -> list[object]:
    found: list[object] = []
    for key, item in value.items():
        if isinstance(item, dict):
            found.extend(_switches(item))
        elif key == "enabled":
            found.append(item)
    return found


def _is_false(switch: object) -> bool:
    try:
        return not parse_flag(switch)
    except ValueError:
        return False
