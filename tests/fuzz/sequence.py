"""One random sequence from its number, and many of them from the command line: ``python -m tests.fuzz.sequence 0 10000``."""

from __future__ import annotations

import collections
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.actions import ACTIONS, Refused, TorchFails, World, save
from tests.fuzz.models import RandomModel
from tests.fuzz.sides import Setting, two_sides

_OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 1e-2}),
    ("AdamW", {"lr": 1e-2, "fused": True}),
    ("AdamW", {"lr": 1e-2, "foreach": False, "amsgrad": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05}),
    ("RMSprop", {"lr": 1e-3, "momentum": 0.5}),
    ("Adagrad", {"lr": 1e-2}),
    ("Lamb", {"lr": 0.05, "weight_decay": 0.01}),
)


def _setting(draw: random.Random, *, groups_frozen: bool) -> Setting:
    loop = draw.choice(["engine", "engine", "plain", "batch"])
    max_norm = draw.choice([0.0, 0.0, 0.05])
    updates = ["auto", "deferred", "step"]
    if max_norm == 0 and loop != "plain":
        updates.append("in_backward")
    is_tight = draw.random() < 0.5
    if is_tight and loop == "plain":
        updates.remove("auto")
    optimizer, arguments = draw.choice(_OPTIMIZERS)
    own: dict[str, Any] = {"update": draw.choice(updates), "prefetch": draw.random() < 0.8}
    if draw.random() < 0.4 and optimizer != "Lamb":  # which wants a page for a whole unit
        own["staging_buffer_bytes"] = 49152
    if draw.random() < 0.2:
        own["keep_in_memory"] = True
    return Setting(
        loop=loop,
        is_bf16=draw.random() < 0.3,
        has_remainder=draw.random() < 0.7,
        accumulation=draw.choice([1, 1, 2, 3]),
        max_norm=max_norm,
        optimizer=optimizer,
        arguments=arguments,
        num_groups=draw.choice([1, 2]),
        offload=draw.choice([("nvme", "nvme"), ("nvme", "nvme"), ("cpu", "cpu"), ("none", "nvme"), ("none", "none")]),
        is_tight=is_tight,
        own=own,
        groups_frozen=groups_frozen,
    )


def run_sequence(number: int, directory: Path) -> str | None:
    """Run the sequence with this number.

    Returns:
        Why the engine refused to go on, or None if it went to the end.

    Raises:
        Exception: anything that differs from plain torch, with what had been done.
    """
    draw = random.Random(number)
    setting = _setting(draw, groups_frozen=number % 4 < 2)
    torch.manual_seed(number)
    model = RandomModel(draw, is_simple=setting.loop == "batch")
    told = f"sequence {number}\n{setting}\n{model}"
    log: list[str] = []
    try:
        with two_sides(model, setting, directory) as (plain, paged):
            world = World(draw, setting, plain, paged)
            world.log = log
            for _ in range(draw.randint(2, 7)):
                action = draw.choices(list(ACTIONS), list(ACTIONS.values()))[0]
                log.append(action.__name__)
                action(world)
            if number % 10 == 0:
                log.append("save")
                save(world, directory)
            world.compare_all()
    except TorchFails:
        return None
    except Refused as refusal:
        return str(refusal)
    except Exception as error:
        error.add_note(f"{told}\n{' -> '.join(log)}")
        raise
    return None


def main(first: int, count: int) -> int:
    """Run sequences and print what went wrong; returns the number of failures."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    refusals: collections.Counter[str] = collections.Counter()
    failures = 0
    began = time.monotonic()
    for number in range(first, first + count):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
            try:
                refusal = run_sequence(number, Path(directory))
            except Exception as error:
                failures += 1
                print(f"--- {type(error).__name__}: {error}\n{''.join(error.__notes__)}", flush=True)
                if "-v" in sys.argv:
                    traceback.print_exc()
            else:
                if refusal is not None:
                    refusals[refusal[:160]] += 1
    for refusal, times in refusals.most_common():
        print(f"{times:5} refused: {refusal}")
    print(f"{count} sequences, {failures} failed, {refusals.total()} refused, {time.monotonic() - began:.0f} s")
    return failures


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
