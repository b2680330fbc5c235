"""Says of each public name of DeepSpeed what it is here: the table in infinity/deepspeed/README.md.

    python tools/deepspeed_names.py            # prints the table
    python tools/deepspeed_names.py --write    # puts it into infinity/deepspeed/README.md, between its two marks
    python tools/deepspeed_names.py --list     # with a Python that has DeepSpeed: prints what belongs into deepspeed_names.txt

The names are those of DeepSpeed 0.19.8: functions and classes that a module defines, or that a package hands on.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import between

_ROOT = Path(__file__).resolve().parent.parent
README = _ROOT / "infinity" / "deepspeed" / "README.md"
LIST = Path(__file__).with_suffix(".txt")
MARKS = (
    "<!-- printed by tools/deepspeed_names.py: change infinity/deepspeed/contents/refused.toml, not this -->",
    "<!-- end of what is printed -->",
)
_MODULES = """
    accelerator checkpointing comm moe.layer moe.utils monitor.monitor ops.adagrad ops.adam ops.lamb ops.lion ops.transformer
    pipe profiling.flops_profiler runtime.base_optimizer runtime.bf16_optimizer runtime.config runtime.dataloader
    runtime.engine runtime.fp16.fused_optimizer runtime.fp16.loss_scaler runtime.fp16.unfused_optimizer runtime.hybrid_engine
    runtime.lr_schedules runtime.utils runtime.zero.config runtime.zero.offload_config runtime.zero.partition_parameters
    runtime.zero.stage3 runtime.zero.stage_1_and_2 runtime.zero.tiling sequence.layer utils utils.groups
    utils.init_on_device utils.logging utils.nvtx utils.tensor_fragment utils.timer utils.z3_leaf_module utils.zero_to_fp32
    zero
"""

_HANDING_ON = ("", "accelerator", "ops.transformer", "pipe", "utils", "zero")
"""These packages hand on what is defined elsewhere."""


def listed() -> dict[str, list[str]]:
    """Module, without "deepspeed" ("": the package itself) -> its public names."""
    lines = [line.partition(":") for line in LIST.read_text().splitlines()]
    return {module.removeprefix("deepspeed").lstrip("."): names.split() for module, _, names in lines}


def found(module: str, name: str) -> Any:
    """What is there of that name; None if there is none."""
    try:
        value = getattr(importlib.import_module(f"infinity.deepspeed.{module}".rstrip(".")), name, None)
    except ModuleNotFoundError:
        return None
    return None if inspect.ismodule(value) else value


def kinds(module: str) -> Iterator[tuple[str, str]]:
    """Each public name of a module, and what is said of it: "" for the same."""
    from infinity.deepspeed.contents.refused import DIFFERS
    from infinity.deepspeed.modules import why_absent

    for name in listed()[module]:
        if found(module, name) is not None:
            yield name, DIFFERS.get(name, "")
        else:
            yield name, f"refused: {why_absent(f'{module}.{name}'.lstrip('.'))}"


def table() -> str:
    """The table, as Markdown."""
    lines = ["| name | here |", "|---|---|"]
    for module in listed():
        by_remark: dict[str, list[str]] = {}
        for name, remark in kinds(module):
            by_remark.setdefault(remark, []).append(name)
        for remark, names in sorted(by_remark.items(), key=lambda pair: (pair[0] != "", pair[0].startswith("refused"))):
            where = f"`{module}`" if module else "`deepspeed`"
            lines.append(f"| {where}: {', '.join(f'`{name}`' for name in names)} | {remark or 'the same'} |")
    return "\n".join(lines)


def page() -> str:
    """The README, with the table as it is now."""
    return between(MARKS, f"{table()}\n", README)


def _list() -> Iterator[str]:
    for module in ["", *_MODULES.split()]:
        try:
            whole = importlib.import_module(f"deepspeed.{module}".rstrip("."))
        except ModuleNotFoundError:  # an attribute, as "zero"
            whole = getattr(importlib.import_module("deepspeed"), module)
        home = "deepspeed" if module in _HANDING_ON else whole.__name__
        names = [
            name
            for name, value in vars(whole).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__.startswith(home)
            and (name != "get_accelerator" or module in ("", "accelerator"))
        ]
        yield f"deepspeed.{module}".rstrip(".") + ": " + " ".join(sorted(names))


def main() -> None:
    parser = argparse.ArgumentParser(description="says of each public name of DeepSpeed what it is here")
    parser.add_argument("--write", action="store_true", help=f"put the table into {README.name}")
    parser.add_argument("--list", action="store_true", help="print DeepSpeed's names; needs DeepSpeed")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(_list()))
        return
    sys.path.insert(0, str(_ROOT))
    if arguments.write:
        README.write_text(page())
    else:
        print(table())


if __name__ == "__main__":
    main()
