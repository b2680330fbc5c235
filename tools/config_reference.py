"""Prints every key of the config, with its default and what it does here: the reference in configs/README.md.

    python tools/config_reference.py            # prints it
    python tools/config_reference.py --write    # puts it into configs/README.md, between its two marks

What is printed comes from the models in infinity/config/schema, which also read the JSON: names, types, bounds, defaults, the
text under each field, and the rules of keys that have no effect or are refused.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from infinity.config.schema import quantities
from infinity.config.schema.block import Block, NoEffect, Refused
from infinity.config.schema.blocks import RootBlock
from infinity.config.schema.vocabulary import child_block
from infinity.optim.lr_schedules import SCHEDULES, schedule_parameters
from infinity.optim.registry import BY_NAME

README = Path(__file__).resolve().parent.parent / "configs" / "README.md"
MARKS = (
    "<!-- printed by tools/config_reference.py: change the schema, not this -->",
    "<!-- end of what is printed -->",
)
WIDTH = 118
_KINDS = {
    quantities.parse_bytes: "a size",
    quantities.parse_count: "a whole number",
    quantities.parse_rounded: "a whole number",
    quantities.parse_number: "a number",
    quantities.parse_names: "a text or a list of texts",
    quantities.parse_path: "a path",
}
_TYPES = {bool: "`true` or `false`", dict: "an object", str: "a text", int: "a whole number", float: "a number"}
_BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


def texts_of(block: type[Block]) -> dict[str, str]:
    """Field name -> the text that stands under the field in the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(block)))
    found: dict[str, str] = {}
    name = None
    for node in tree.body[0].body:  # type: ignore[attr-defined]
        if name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        name = node.target.id if is_field else None
    return found


def blocks(block: type[Block] = RootBlock, path: str = "") -> Iterator[tuple[str, type[Block]]]:
    """Every block of the JSON by its dotted path, the top level first."""
    yield path, block
    for name, field in block.model_fields.items():
        if (child := child_block(field.annotation)) is not None:
            yield from blocks(child, f"{path}{name}.")


def has_effect(field: FieldInfo) -> bool:
    """Whether the key is neither accepted without effect nor refused."""
    return not any(isinstance(item, NoEffect | Refused) for item in field.metadata)


def _leaves(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    yield origin if origin is dict else annotation
    yield from getattr(annotation, "__metadata__", ())
    if origin not in (Literal, dict):
        for inner in get_args(annotation):
            yield from _leaves(inner)


def _kind(field: FieldInfo) -> str:
    parts = [*field.metadata, *_leaves(field.annotation)]
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    readers = [part.func for part in parts if isinstance(part, BeforeValidator)]
    kind = next((_KINDS[reader] for reader in readers if reader in _KINDS), None)
    kind = kind or next((_TYPES[part] for part in parts if part in _TYPES), "a value")
    bounds: list[str] = []
    for part in parts:
        for item in getattr(part, "metadata", None) or [part]:
            for sign, words in _BOUNDS.items():
                limit = getattr(item, sign, None)
                if isinstance(limit, int | float) and f"{words} {limit:g}" not in bounds:
                    bounds.append(f"{words} {limit:g}")
    if "more than 0" in bounds and "at least 0" in bounds:
        bounds.remove("at least 0")
    return f"{kind}{', ' if bounds else ''}{' and '.join(bounds)}"


def _default(field: FieldInfo, text: str) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return 'default `"auto"`' if '`"auto"`:' in text else "not set by default"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"default `{json.dumps(value if value != () else [])}`"


def _item(text: str) -> str:
    lines = textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _effective(path: str, block: type[Block]) -> list[str]:
    texts = texts_of(block)
    items = []
    for name, field in block.model_fields.items():
        if has_effect(field) and child_block(field.annotation) is None:
            text = texts.get(name, "")
            facts = _kind(field) if name != "nvme_path" else "a path, an object, or a list of those"
            items.append(_item(f"`{name}` ({facts}; {_default(field, text)}). {text}"))
    return items


def _grouped(rule: type[NoEffect] | type[Refused]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for path, block in blocks():
        if path.startswith("zero_optimization.offload_optimizer."):
            continue  # the same keys as in offload_param
        for name, field in block.model_fields.items():
            for item in field.metadata:
                if isinstance(item, rule):
                    reason = item.reason if isinstance(item, NoEffect) else f"{item.reason}. {item.cure}"
                    groups.setdefault(reason, []).append(f"`{path}{name}`")
    items = []
    for reason, keys in groups.items():
        text = re.sub("^no effect: ", "", reason)
        items.append(_item(f"{', '.join(keys)}: {text}."))
    return items


def reference() -> str:
    """The whole of it, as Markdown."""
    parts: list[str] = []
    for path, block in blocks():
        items = _effective(path, block)
        if items and not path.startswith("zero_optimization.offload_optimizer."):
            name = path.rstrip(".")
            title = f"`{name}`" if name else "The top level"
            if name == "zero_optimization.offload_param":
                title = "`zero_optimization.offload_param` and `zero_optimization.offload_optimizer`"
            parts += [f"### {title}\n", "\n".join(items) + "\n"]
    names = ", ".join(f"`{cls.__name__}`" for cls in BY_NAME.values())
    others = "Other element-wise classes of `torch.optim` go by their own names. Upper and lower case do not matter."
    parts += ["### Optimizers by name\n", "\n".join(textwrap.wrap(f"{names}. {others}", WIDTH)) + "\n"]
    schedules = []
    for name in SCHEDULES:
        positions = ("last_epoch", "last_batch_iteration")
        known = {key: needed for key, needed in schedule_parameters(name).items() if key not in positions}
        needed = [f"`{key}`" for key, is_needed in known.items() if is_needed]
        taken = [f"`{key}`" for key, is_needed in known.items() if not is_needed]
        schedules.append(_item(f"`{name}`: needs {', '.join(needed) or 'nothing'}; takes {', '.join(taken)}."))
    schedules.append("- those of `torch.optim.lr_scheduler` that take numbers only, by their own names.")
    parts += ["### Learning rate schedules by name\n", "\n".join(schedules) + "\n"]
    renamed = [
        _item(f"`{path}{old}` means `{path}{new}`.") for path, block in blocks() for old, new in block.renamed.items()
    ]
    parts += ["### Older and other spellings\n", "\n".join(renamed) + "\n"]
    parts += ["### Refused when switched on\n", "\n".join(_grouped(Refused)) + "\n"]
    parts += ["### Accepted without effect\n", "\n".join(_grouped(NoEffect)) + "\n"]
    return "\n".join(parts)


def between_marks(text: str) -> str:
    """What a README holds of the reference."""
    return text.split(MARKS[0])[1].split(MARKS[1])[0].strip("\n") + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into configs/README.md")
    if not parser.parse_args().write:
        print(reference(), end="")
        return
    before, after = README.read_text().split(MARKS[0])[0], README.read_text().split(MARKS[1])[1]
    README.write_text(f"{before}{MARKS[0]}\n\n{reference()}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
