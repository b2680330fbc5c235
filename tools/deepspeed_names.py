"""Says of each public name of DeepSpeed what it is here: the table in docs/reference/deepspeed-names.md.

    python tools/deepspeed_names.py            # prints the table
    python tools/deepspeed_names.py --write    # puts it into docs/reference/deepspeed-names.md, between its two marks

The names in deepspeed_names.txt are those of DeepSpeed 0.19.8: functions and classes that a module defines, or that a package
hands on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import REFERENCE, print_or_write

PAGE = REFERENCE / "deepspeed-names.md"
LIST = Path(__file__).with_suffix(".txt")


def listed() -> dict[str, list[str]]:
    """Module, without "deepspeed" ("": the package itself) -> its public names."""
    # "deepspeed.ops.adam: FusedAdam DeepSpeedCPUAdam" gives {"ops.adam": ["FusedAdam", "DeepSpeedCPUAdam"]}.
    lines = [line.partition(":") for line in LIST.read_text().splitlines()]
    return {module.removeprefix("deepspeed").lstrip("."): names.split() for module, _, names in lines}


def found(module: str, name: str) -> Any:
    """Return our value of a name of DeepSpeed's; None without one."""
    try:
        value = getattr(importlib.import_module(f"infinity.deepspeed.{module}".rstrip(".")), name, None)
    except ModuleNotFoundError:
        return None
    # A submodule of the same name is no answer for a function.
    return None if inspect.ismodule(value) else value


def kinds(module: str) -> Iterator[tuple[str, str]]:
    """Yield each public name of a module and a remark: "" if it does the same here."""
    from infinity.deepspeed.contents.names import DIFFERS
    from infinity.deepspeed.modules import why_absent

    for name in listed()[module]:
        if found(module, name) is not None:
            yield name, DIFFERS.get(name, "")
        else:
            yield name, f"refused: {why_absent(f'{module}.{name}'.lstrip('.'))}"


def reference() -> str:
    """Return the table, as Markdown."""
    lines = ["| name | here |", "|---|---|"]
    for module in listed():
        by_remark: dict[str, list[str]] = {}
        for name, remark in kinds(module):
            by_remark.setdefault(remark, []).append(name)
        # In each module first what is the same, then what differs, then what is refused.
        for remark, names in sorted(by_remark.items(), key=lambda pair: (pair[0] != "", pair[0].startswith("refused"))):
            where = f"`{module}`" if module else "`deepspeed`"
            lines.append(f"| {where}: {', '.join(f'`{name}`' for name in names)} | {remark or 'the same'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print_or_write(__doc__, PAGE, reference)
