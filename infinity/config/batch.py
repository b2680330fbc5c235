"""The batch sizes: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * processes."""

from __future__ import annotations

import math
from collections.abc import Collection

from infinity.config.resolved import Decision
from infinity.config.schema.blocks import RootBlock
from infinity.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
ANY_BATCH = {MICRO: 1, TRAIN: None, ACCUMULATION: None}
"""Overrides with which a config is read where its batch sizes do not matter, or are not complete yet."""


def resolve_batch_sizes(
    root: RootBlock, *, auto: Collection[str], world_size: int
) -> tuple[int | None, int | None, int, list[Decision]]:
    """Fill in missing batch sizes, as DeepSpeed does. A division with a remainder is an error.

    Args:
        root: the config.
        auto: names of the keys whose value is "auto": they may stay open.
        world_size: number of processes.

    Returns:
        Samples per step, samples per backward and process (both None when the data loader decides them), backwards per
        step, and who decided them.

    Raises:
        ConfigError: the sizes contradict each other, or say nothing.
    """
    # With two of the three sizes given, the third follows. Example: train 64, micro 4, 8 processes: accumulation is
    # 64 / (4 * 8) = 2. With train 64 and micro 4 on 7 processes nothing fits, and `_divide` names 56 or 84.
    given = {key: getattr(root, key) for key in (TRAIN, MICRO, ACCUMULATION)}
    train, micro, accumulation = given.values()
    if micro is not None:
        if train is None:
            # DeepSpeed does the same: a missing accumulation is 1.
            accumulation = accumulation or 1
            train = micro * accumulation * world_size
        elif accumulation is None:
            accumulation = _divide(train, {MICRO: micro, "processes": world_size})
        elif train != micro * accumulation * world_size:
            expected = micro * accumulation * world_size
            # `infinity config check` runs in one process, and the config may be written for several. If some number of
            # processes makes the product right, the error names it.
            num, rest = divmod(train, micro * accumulation)
            more = "" if rest else f", start {num} processes (`infinity config check --processes {num}`)"
            raise ConfigError.of_batch(
                f"{TRAIN} = {train} is not {MICRO} * {ACCUMULATION} * processes = "
                f"{micro} * {accumulation} * {world_size} = {expected}",
                cure=f"Set {TRAIN} to {expected}{more}, or leave one of the three out",
            )
    elif train is not None:
        accumulation = accumulation or 1
        micro = _divide(train, {ACCUMULATION: accumulation, "processes": world_size})
    else:
        # "auto" is what transformers and accelerate replace. If nothing replaces it, the sizes stay None, and the first
        # batch of the data loader decides.
        if TRAIN not in auto and MICRO not in auto:
            raise ConfigError.of_batch(
                "the config names no batch size",
                cure=f"Set {MICRO} (samples per backward) or {TRAIN} (samples per step); "
                '"auto" takes what the data loader gives',
            )
        accumulation = accumulation or 1
    resolved = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    decisions = [
        Decision(key, value if value is not None else "of the data loader", _decided_by(given[key], key in auto, value))
        for key, value in resolved.items()
    ]
    return train, micro, accumulation, decisions


def _divide(train: int, divisors: dict[str, int]) -> int:
    product = math.prod(divisors.values())
    if train % product == 0:
        return train // product
    # The multiples next to the given size. Below `product` there is only the one above: 0 is no batch size.
    lower = train // product * product
    nearest = f"{lower} or {lower + product}" if lower else f"{product}"
    names = " * ".join(divisors)
    values = " * ".join(map(str, divisors.values()))
    raise ConfigError.of_batch(
        f"{TRAIN} = {train} cannot be divided by {names} = {values} = {product}",
        cure=f"Set {TRAIN} to {nearest}, or change {next(iter(divisors))}",
    )


def _decided_by(given: int | None, is_auto: bool, value: int | None) -> str:
    if given is not None:
        return "config"
    if value is None:
        return '"auto"' if is_auto else "follows from the data loader"
    return '"auto", from the other batch sizes' if is_auto else "from the other batch sizes"
