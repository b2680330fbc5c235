"""Adds the keys and spellings of `inert.toml` to the models: keys whose values nobody reads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, create_model

from infinity.config.schema.block import Block, Count, Elements, Flag, Keys, NoEffect, Number, Refused, Untyped

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
_B = TypeVar("_B", bound=Block)


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
