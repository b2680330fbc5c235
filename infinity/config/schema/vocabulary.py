"""The blocks and keys of the schema, and the key that a misspelt one may have meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args

from pydantic.fields import FieldInfo

from infinity.config.schema.block import Block, Keys, Untyped
from infinity.config.schema.blocks import RootBlock
from infinity.errors import nearest


def child_block(field: FieldInfo | None) -> type[Block] | None:
    """Return the block that a field holds; None for a value or a missing field."""
    annotation = None if field is None else field.annotation
    # `OptimizerBlock | None` has its block among the arguments of the union.
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate
    return None


def opened(value: Any, field: FieldInfo | None) -> Any:
    """Return the value of a field with the short form of a switch written out: true for "bf16" as {"enabled": true}."""
    if not isinstance(value, bool) or field is None:
        return value
    child = child_block(field)
    is_switch = field.annotation == Untyped or (child is not None and "enabled" in child.model_fields)
    return {"enabled": value} if is_switch else value


def suggest(path: str, name: str, known_here: Iterable[str]) -> str | None:
    """Return the key that may have been meant by `name` in the block at `path` ("" or ending in a dot).

    A key that exists, but in another place, is more likely than a misspelt one; a misspelt one is looked for in its own
    block first.
    """
    everywhere = known_keys()
    # A right key in the wrong block: "stage" at the top level is zero_optimization.stage.
    if name in everywhere:
        return everywhere[name]
    if (near := nearest(name, known_here)) is not None:
        return path + near
    # Among all keys something always looks similar: 0.86 of difflib's ratio needs a closer match than in one block, and more
    # than three letters that are also those of a key of four, as "moe" and "mode".
    if (near := nearest(name, everywhere, cutoff=0.86)) is not None:
        return everywhere[near]
    return None


@cache
def known_keys() -> dict[str, str]:
    """Return the dotted path of each key. Of several, the one nearest to the top counts."""
    paths: list[str] = []
    for path, block in blocks():
        for name, field in block.model_fields.items():
            paths.append(path + name)
            paths += [f"{path}{name}.{key}" for item in field.metadata if isinstance(item, Keys) for key in item.names]
    found: dict[str, str] = {}
    # Sorted by depth, and `setdefault` keeps the first.
    for path in sorted(paths, key=lambda path: path.count(".")):
        found.setdefault(path.rpartition(".")[2], path)
    return found


def blocks(block: type[Block] = RootBlock, path: str = "") -> Iterator[tuple[str, type[Block]]]:
    """Yield every block of the JSON with its dotted path, the top level first."""
    yield path, block
    for name, field in block.model_fields.items():
        if (child := child_block(field)) is not None:
            yield from blocks(child, f"{path}{name}.")
