"""``infinity config``: check a config, show its decided values, print its JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from infinity.cli.output import PathType, display, json_option, print_json, table

if TYPE_CHECKING:
    from infinity.config import InfinityConfig

_FILE = click.argument("file", type=PathType())
_WORLD = click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of processes that train together.",
)


def _loaded(file: Path, processes: int, *, check_storage: bool) -> InfinityConfig:
    from infinity.config import load_config

    return load_config(file, world_size=processes, check_storage=check_storage)


def loaded_for_one(file: Path, overrides: Mapping[str, Any]) -> InfinityConfig:
    """Load a config as one process would, without looking at its directories."""
    from infinity.config import load_config
    from infinity.config.batch import ACCUMULATION, MICRO, TRAIN
    from infinity.config.load import read_file
    from infinity.config.reading import tidy
    from infinity.config.schema.block import Findings

    # A config for 8 processes says train 64, micro 4, accumulation 2, and 64 = 4 * 2 * 8 is an error for one process.
    # `plan` and `doctor` do not know the number of processes. So the total is dropped if it is a multiple of the
    # others.
    sizes: dict[str, Any] = tidy(read_file(file), Findings())
    counts: list[Any] = [sizes.get(key) for key in (TRAIN, MICRO, ACCUMULATION)]
    if all(isinstance(count, int) and count > 0 for count in counts) and not counts[0] % (counts[1] * counts[2]):
        overrides = {**overrides, TRAIN: None}
    return load_config(file, overrides=overrides, world_size=1, check_storage=False)


@click.group()
def config() -> None:
    """Check a config, show its resolved values, or print its JSON schema."""


@config.command()
@_FILE
@click.option("--no-storage", is_flag=True, help="Do not check the directories: the config is for another machine.")
@_WORLD
@json_option
def check(file: Path, no_storage: bool, processes: int, as_json: bool) -> None:
    """Load a config as infinity.initialize does. Prints the first error, with exit status 1.

    \b
    Examples:
      infinity config check ds_config.json
      infinity config check ds_config.json --no-storage --processes 8
    """
    import torch

    from infinity.optim.executor import one_element
    from infinity.optim.wrapped_optimizer import wrap_optimizer
    from infinity.torch_internals.names import without_compiler

    loaded = _loaded(file, processes, check_storage=not no_storage)
    if loaded.optimizer is not None:
        # Skips importing torch's compiler, which building an optimizer would do.
        with without_compiler():
            # Arguments of the optimizer are checked where it is built: build it on one element, as the engine does on a
            # real one.
            wrap_optimizer(loaded.optimizer, [("weight", torch.nn.Parameter(one_element()))], "cpu")
    if as_json:
        print_json({"file": str(file), "is_valid": True, "without_effect": list(loaded.notices)})
        return
    display(f"{file}: valid", soft_wrap=True)
    _print_notices(loaded, soft_wrap=True)


@config.command()
@_FILE
@_WORLD
@json_option
def show(file: Path, processes: int, as_json: bool) -> None:
    """Show the resolved value of every key, and what decided it.

    \b
    Examples:
      infinity config show ds_config.json
      infinity config show ds_config.json --json | jq '.decisions[] | select(.key | test("infinity"))'
    """
    loaded = _loaded(file, processes, check_storage=False)
    if as_json:
        decisions = [each._asdict() | {"value": _plain(each.value)} for each in loaded.decisions]
        print_json({"file": str(file), "decisions": decisions, "without_effect": list(loaded.notices)})
        return
    shown = table("key", "value", "decided by", keeps_first=True)
    for each in loaded.decisions:
        shown.add_row(each.key, str(each.value), each.decided_by)
    display(shown)
    _print_notices(loaded)


@config.command()
def schema() -> None:
    """Print the JSON schema of a config, for editors.

    \b
    Examples:
      infinity config schema > infinity.schema.json
    Then begin a config with  "$schema": "./infinity.schema.json"  and the editor completes and checks it.
    """
    from infinity.config.schema.json_schema import json_schema

    print_json(json_schema())


def _print_notices(loaded: InfinityConfig, *, soft_wrap: bool = False) -> None:
    if loaded.notices:
        display("\nwithout effect:", style="bold", soft_wrap=soft_wrap)
    for notice in loaded.notices:
        display(f"  {notice}", soft_wrap=soft_wrap)


def _plain(value: object) -> Any:
    # torch dtypes and paths become texts.
    return value if value is None or isinstance(value, bool | int | float) else str(value)
