"""Prints every key of the config, with its default and what it does here: the reference in docs/reference/keys.md.

    python tools/config_reference.py            # prints it
    python tools/config_reference.py --write    # puts it into docs/reference/keys.md, between its two marks

What is printed comes from the models in infinity/config/schema, which also read the JSON: names, types, bounds, defaults, the
text under each field, and the rules of keys that have no effect or are refused.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from pages import REFERENCE, WIDTH, item, print_or_write
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from infinity.config.schema import directories, quantities
from infinity.config.schema.block import Block, NoEffect, Refused
from infinity.config.schema.json_schema import choices_of, leaves, rules_of, texts_of
from infinity.config.schema.vocabulary import blocks, child_block
from infinity.optim.lr_schedules import SCHEDULES, schedule_parameters
from infinity.optim.registry import BY_NAME

PAGE = REFERENCE / "keys.md"
_FROZEN = ", ".join(f'`"{name}"`' for name in quantities.FROZEN_DTYPES)
# Parser of a key -> its type in words. Bounds are in the metadata of the annotation.
_KINDS = {
    quantities.parse_bytes: "a size",
    quantities.parse_count: "a whole number",
    quantities.parse_rounded: "a whole number",
    quantities.parse_number: "a number",
    quantities.parse_names: "a text or a list of texts",
    quantities.parse_path: "a path",
    quantities.parse_frozen_dtype: f"one of {_FROZEN}, or an object",
    directories.parse_directories: "a path, an object, or a list of those",
}
_TYPES = {bool: "`true` or `false`", dict: "an object", str: "a text", int: "a whole number", float: "a number"}
_LEAST, _MOST = {"gt": "more than", "ge": "at least"}, {"lt": "less than", "le": "at most"}


def _effective(path: str, block: type[Block]) -> list[str]:
    texts = texts_of(block)
    items = []
    for name, field in block.model_fields.items():
        if not any(rules_of(field)) and child_block(field) is None:
            text = texts.get(name, "")
            items.append(item(f"`{name}` ({kind_of(field)}; {default_of(field, text)}). {text}"))
    return items


def _grouped(rule: type[NoEffect] | type[Refused]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for path, block in blocks():
        if path.startswith("zero_optimization.offload_optimizer."):
            # Both fields hold an `OffloadBlock`.
            continue  # the same keys as in offload_param
        for name, field in block.model_fields.items():
            for each in field.metadata:
                if isinstance(each, rule):
                    reason = each.reason if isinstance(each, NoEffect) else f"{each.reason}. {each.cure}"
                    # One item of the list for all keys with the same reason.
                    groups.setdefault(reason, []).append(f"`{path}{name}`")
    items = []
    for reason, keys in groups.items():
        text = re.sub("^no effect: ", "", reason)
        items.append(item(f"{', '.join(keys)}: {text}."))
    return items


def kind_of(field: FieldInfo) -> str:
    """Describe the values of a key in words, with bounds."""
    # pydantic moves the metadata of the outermost Annotated to the field; what is inside of a union stays there.
    parts = [*field.metadata, *leaves(field.annotation)]
    if choices := choices_of(field):
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    readers = [part.func for part in parts if isinstance(part, BeforeValidator)]
    kind = next((_KINDS[reader] for reader in readers if reader in _KINDS), None)
    kind = kind or next((_TYPES[part] for part in parts if part in _TYPES), "a value")
    items = [item for part in parts for item in getattr(part, "metadata", None) or [part]]
    # Of several lower bounds the largest counts, and of upper bounds the smallest: Count has ge=0, a field may add
    # gt=0.
    bounds = [*_limits(items, _LEAST)[-1:], *_limits(items, _MOST)[:1]]
    return f"{kind}{', ' if bounds else ''}{' and '.join(bounds)}"


def _limits(items: list[Any], signs: Mapping[str, str]) -> list[str]:
    """Return bounds in words, the smallest first. At the same number, "more than" counts as larger."""
    found = [
        (getattr(each, sign, None), sign in ("gt", "le"), words) for each in items for sign, words in signs.items()
    ]
    given = sorted(each for each in found if isinstance(each[0], int | float))
    return [f"{words} {limit:g}" for limit, _, words in given]


def default_of(field: FieldInfo, text: str) -> str:
    """Describe the default of a key; ``text``: the text under its field."""
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None:
        # None stands for "auto" in the models: the text under the field says so.
        return 'default `"auto"`' if '`"auto"`:' in text else "not set by default"
    if isinstance(value, float) and value.is_integer():
        # "default `0`" and not "0.0".
        value = int(value)
    return f"default `{json.dumps(value if value != () else [])}`"


def reference() -> str:
    """Return the reference as Markdown."""
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
    others = (
        "Other element-wise classes of `torch.optim` go by their own names. Upper and lower case do not matter. torch's "
        'fused kernel is used if there is one, whose last bits differ from those of the default; `"fused": false` in '
        "`params` gives the default's."
    )
    parts += ["### Optimizers by name\n", "\n".join(textwrap.wrap(f"{names}. {others}", WIDTH)) + "\n"]
    schedules = []
    for name in SCHEDULES:
        positions = ("last_epoch", "last_batch_iteration")
        known = {key: needed for key, needed in schedule_parameters(name).items() if key not in positions}
        needed = [f"`{key}`" for key, is_needed in known.items() if is_needed]
        taken = [f"`{key}`" for key, is_needed in known.items() if not is_needed]
        schedules.append(item(f"`{name}`: needs {', '.join(needed) or 'nothing'}; takes {', '.join(taken)}."))
    schedules.append("- those of `torch.optim.lr_scheduler` that take numbers only, by their own names.")
    parts += ["### Learning rate schedules by name\n", "\n".join(schedules) + "\n"]
    renamed = [
        item(f"`{path}{old}` means `{path}{new}`.") for path, block in blocks() for old, new in block.renamed.items()
    ]
    parts += ["### Older and other spellings\n", "\n".join(renamed) + "\n"]
    parts += ["### Refused when switched on\n", "\n".join(_grouped(Refused)) + "\n"]
    both = "Items about `zero_optimization.offload_param` apply to `zero_optimization.offload_optimizer` as well."
    parts += ["### Accepted without effect\n", f"{both}\n", "\n".join(_grouped(NoEffect)) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    print_or_write(__doc__, PAGE, reference)
