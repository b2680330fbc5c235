"""`Block`, the base of the models of the JSON, the marks that a key may have besides its type, and the keys of
`inert.toml`, whose values nobody reads.

A key with neither `NoEffect` nor `Refused` has an effect. `Refused` is for whatever would change the numbers if it were
ignored; `NoEffect` is for speed, memory and logging.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from infinity.config.schema.quantities import parse_count, parse_flag, parse_number, parse_rounded
from infinity.errors import ConfigError

# The parsers replace pydantic's own conversions, which accept "1" as true and refuse 1e9 as an integer.
Flag = Annotated[bool, BeforeValidator(parse_flag)]
Number = Annotated[float, BeforeValidator(parse_number)]
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(parse_count), Field(gt=0)]
Elements = Annotated[int, BeforeValidator(parse_rounded), Field(ge=0)]
Untyped = dict[str, Any] | None
"""A block that is taken or refused as a whole, or whose content others know."""
_GROUPS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("inert.toml").read_text("utf-8"))
_KINDS: dict[str, Any] = {
    "flag": Flag,
    "count": Count,
    "elements": Elements,
    "number": Number,
    "share": Annotated[Number, Field(ge=0, le=1)],
    "text": str,
    "object": Untyped,
    "any": Any,
}
_B = TypeVar("_B", bound="Block")


class Block(BaseModel):
    """One JSON object. Field names are the JSON's keys; `renamed` maps other spellings to them."""

    # `tidy` has removed unknown keys, with better messages: "forbid" only guards callers that skip it.
    model_config = ConfigDict(extra="forbid", frozen=True)
    renamed: ClassVar[Mapping[str, str]] = {}

    def is_active(self) -> bool:
        """Whether the block is switched on. What a switched-off block holds is checked for names only."""
        # A block without a switch is always on. `OffloadBlock` overrides this: its switch is `device`.
        return bool(getattr(self, "enabled", True))


@dataclass
class Findings:
    """Collects what reading a config finds besides the values."""

    unknown: list[tuple[str, str | None]] = field(default_factory=list)
    """Dotted path of each unknown key, and what may have been meant."""
    auto: list[str] = field(default_factory=list)
    """Dotted paths whose value is "auto"."""
    ineffective: dict[str, list[str]] = field(default_factory=dict)
    """For each reason the keys that have no effect because of it."""

    def record(self, key: str, reason: str) -> None:
        """Record that `key` is accepted without effect."""
        # By reason, so that the log has one line for twenty keys that only tune DeepSpeed.
        keys = self.ineffective.setdefault(reason, [])
        if key not in keys:
            keys.append(key)

    def notices(self) -> tuple[str, ...]:
        """One sentence per reason."""
        return tuple(f"{', '.join(keys)}: {reason}" for reason, keys in self.ineffective.items())


@dataclass(frozen=True)
class NoEffect:
    """Marks a key that is accepted without effect. Values in `silent` are not reported: they ask for nothing."""

    reason: str
    silent: tuple[object, ...] = ()

    def apply(self, key: str, value: object, findings: Findings) -> None:
        """Record it for a given key of a block that is switched on."""
        if value not in self.silent and not is_switched_off(value):
            findings.record(key, self.reason)


@dataclass(frozen=True)
class Refused:
    """Marks a key that is not implemented and would change the numbers. Passes: `allowed`, and switched-off blocks."""

    reason: str
    cure: str
    allowed: tuple[object, ...] = (False,)
    is_by_parts: bool = False
    """Whether the outermost `enabled` of a block switches nothing on where its parts have switches of their own."""

    def apply(self, key: str, value: object, findings: Findings) -> None:
        """Refuse it, unless it passes."""
        asked = value
        if self.is_by_parts and isinstance(value, dict):
            # data_efficiency: {"enabled": true, "data_sampling": {"enabled": false}} asks for nothing. The outer switch
            # is dropped, so that only the inner ones count.
            parts = {name: part for name, part in value.items() if name != "enabled"}
            asked = parts if _switches(parts) else value
        if value not in self.allowed and not (is_switched_off(value) or is_switched_off(asked)):
            raise ConfigError.unsupported(key, value, self.reason, cure=self.cure)


@dataclass(frozen=True)
class Keys:
    """Marks a block whose values nobody reads, with the names of the keys that it may have."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NotNull:
    """Marks a key that may not be null, because readers would expect another value than its default."""

    problem: str
    cure: str


def is_switched_off(value: object) -> bool:
    """Whether an untyped block asks for nothing: it is empty, or every `enabled` in it, however deep, is false.

    A block without any `enabled` is switched on: the word may be misspelt.
    """
    if not isinstance(value, dict):
        return False
    switches = _switches(value)
    # {} is off. {"enabled": false} is off. {"enabld": false} has no switch, and is on: the error then names the block.
    return not value or (bool(switches) and all(_is_false(switch) for switch in switches))


def _switches(value: dict[str, Any]) -> list[object]:
    found: list[object] = []
    for key, item in value.items():
        if isinstance(item, dict):
            # "enabled" may also be the name of a block inside; then its own switches count.
            found.extend(_switches(item))
        elif key == "enabled":
            found.append(item)
    return found


def _is_false(switch: object) -> bool:
    try:
        return not parse_flag(switch)
    # A switch with a value that is no flag is not off: the type error comes later.
    except ValueError:
        return False


# -------------------------------------------------------------------------------------------------- keys without effect


def with_deepspeed_only_keys(block: type[_B]) -> type[_B]:
    """Return the model with the keys and spellings that the table has for it."""
    # A line "sequence_parallel_size count 1" in a group with a cure becomes the field
    #   sequence_parallel_size: Annotated[Count, Refused(reason, cure, allowed=(0, 1))] = 1
    # and "partition_activations flag false silent" in one without, where false is not reported:
    #   partition_activations: Annotated[Flag, NoEffect(reason, silent=(False,))] = False
    fields: dict[str, Any] = {"renamed": (ClassVar, _GROUPS["renamed"].get(block.__name__, {}))}
    for group in _GROUPS[block.__name__]:
        for line in group["keys"].strip().splitlines():
            name, kind, *words = line.split()
            fields[name] = _field(kind, words, group["reason"], group.get("cure"))
    # `__module__` as in the source: `texts_of` finds the texts under the fields by the class's source.
    return create_model(block.__name__, __base__=block, __module__=block.__module__, __doc__=block.__doc__, **fields)


def _field(kind: str, words: list[str], reason: str, cure: str | None) -> tuple[Any, Any]:
    """Return annotation and default of a key."""
    if kind == "object":
        default, known = None, [Keys(tuple(words))] if words else []
    else:
        # The default is written as JSON: true, 0, "text".
        default, known = json.loads(words[0]) if words else None, []
    rule: NoEffect | Refused = NoEffect(reason, silent=(default,) if words[1:] == ["silent"] else ())
    if cure is not None:
        # A size of 0 or 1 is no parallelism, so these pass.
        rule = Refused(reason, cure, allowed=(0, 1) if kind == "count" else (False,))
    return Annotated[_KINDS[kind], *known, rule], default
