"""The settings under which training has to give the same bits, and which of them a run visits.

``CI_ROWS`` is a pairwise covering with a few combinations of three and four added. ``full_rows()`` is every combination
of the axes that decide how data moves; the companion axes (what is trained, and by which loop) take turns along it,
because their full product would take days.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.exactness.covering import covering_rows, extended, pairs

MOVEMENT_AXES: dict[str, tuple[Hashable, ...]] = {
    "offload_param": ("nvme", "cpu", "none"),
    "offload_optimizer": ("nvme", "cpu", "none"),
    "checkpointing": ("none", "non_reentrant", "reentrant"),
    "page": ("small", "large", "auto"),
    "budget": ("tight", "roomy", "half", "everything"),
    "prefetch": (True, False),
    "accumulation": (1, 3),
    "clipping": (True, False),
    "update": ("auto", "deferred", "step"),
}
COMPANION_AXES: dict[str, tuple[Hashable, ...]] = {
    "optimizer": ("config", "groups", "instance"),
    "dtype": ("fp32", "bf16"),
    "loop": ("engine", "plain"),
    "main_weights": ("auto", "fp32"),
    "gradient_dtype": ("auto", "fp32", "bf16"),
    "state_dtype": ("fp32", "bf16", "int8"),
}
AXES = {**MOVEMENT_AXES, **COMPANION_AXES}
WORKERS = (1, 2, 3, 5)
"""Numbers of update workers: shared out among the rows, which become no more by that."""

# An update may start inside backward only here, so each value of every other axis has to meet all three at once.
IN_BACKWARD: dict[str, Hashable] = {"loop": "engine", "accumulation": 1, "clipping": False, "update": "auto"}
# An update that waits until its unit is wanted, and fills the buffer that the forward will use.
DEFERRED: dict[str, Hashable] = {"offload_param": "nvme", "prefetch": True, "update": "deferred"}
# Main weights in two halves.
HALVES: dict[str, Hashable] = {"dtype": "bf16", "main_weights": "auto"}
# The job this package exists for meets every other value, and meets its tightest form in both kinds of update.
MAIN_JOB: dict[str, Hashable] = {"offload_param": "nvme", "offload_optimizer": "nvme"}
# Main gradients wait for the last micro-batch here, and the tiers decide where.
ACCUMULATED: dict[str, Hashable] = {"loop": "engine", "accumulation": 3}


@dataclass(frozen=True)
class Row:
    """One combination of settings.

    Attributes:
        offload_param: tier of the model weights.
        offload_optimizer: tier of the main weights and the optimizer state.
        checkpointing: activation checkpointing of the blocks.
        page: ``small`` cuts most parameters into several pages, ``large`` takes many parameters into one, and ``auto``
            leaves the size to the engine.
        budget: ``tight`` is the smallest host budget that the engine accepts, ``roomy`` has room for everything and leaves
            it on NVMe all the same, ``half`` keeps about half of weights and states in memory, ``everything`` all of them.
        prefetch: whether units are read ahead of need.
        accumulation: micro-batches per step.
        clipping: whether the global gradient norm is clipped.
        update: when the optimizer runs; ``auto`` is in backward where nothing forbids it.
        optimizer: ``config`` names AdamW in the config; ``groups`` adds parameter groups; ``instance`` passes a torch
            AdamW with groups.
        dtype: compute dtype.
        loop: ``engine`` calls engine.backward and engine.step, ``plain`` calls loss.backward and optimizer.step.
        main_weights: how main weights are kept; ``auto`` is in two halves with bf16.
        gradient_dtype: of waiting gradients; with fp32 compute it is fp32, and only ``bf16`` may change a bit.
        state_dtype: as what optimizer states are stored.
        workers: threads that run updates.
    """

    offload_param: str = "nvme"
    offload_optimizer: str = "nvme"
    checkpointing: str = "none"
    page: str = "large"
    budget: str = "roomy"
    prefetch: bool = True
    accumulation: int = 1
    clipping: bool = False
    update: str = "auto"
    optimizer: str = "config"
    dtype: str = "fp32"
    loop: str = "engine"
    main_weights: str = "auto"
    gradient_dtype: str = "auto"
    state_dtype: str = "fp32"
    workers: int = 1

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Row:
        return cls(**values)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def rounds_half_up(self) -> bool:
        """Whether the model weight is the main weight rounded half up, not half to even."""
        return self.dtype == "bf16" and self.main_weights == "auto"

    @property
    def rounds_gradients(self) -> bool:
        """Whether the sum of gradients is rounded to bf16 after each micro-batch."""
        return self.dtype == "bf16" and self.gradient_dtype == "bf16" and self.accumulation > 1

    @property
    def numerics(self) -> Row:
        """The row with all that must not change a bit at its default: equal for rows that share a reference."""
        names = ("offload_param", "offload_optimizer", "page", "budget", "prefetch", "update", "workers")
        unimportant = {name: getattr(Row(), name) for name in names}
        if self.dtype == "fp32":
            unimportant["main_weights"] = Row().main_weights
        if not self.rounds_gradients:
            unimportant["gradient_dtype"] = Row().gradient_dtype
        # Without division by the number of micro-batches, the two loops are one.
        loop = self.loop if self.accumulation > 1 else Row().loop
        return replace(self, **unimportant, loop=loop)

    @property
    def name(self) -> str:
        """Short, unique, fit for a pytest id and for -k."""
        words = (
            f"p_{self.offload_param}",
            f"o_{self.offload_optimizer}",
            {"none": "nock", "reentrant": "reck", "non_reentrant": "ck"}[self.checkpointing],
            f"{self.page}page",
            self.budget,
            "prefetch" if self.prefetch else "demand",
            f"ga{self.accumulation}",
            "clip" if self.clipping else "noclip",
            f"u_{self.update}",
            self.optimizer,
            self.dtype,
            self.loop,
            f"m_{self.main_weights}",
            f"g_{self.gradient_dtype}",
            f"s_{self.state_dtype}",
            f"w{self.workers}",
        )
        return "-".join(words)


def covered_partials() -> list[Mapping[str, Hashable]]:
    """What the rows of CI have to contain."""
    return [
        *pairs(AXES),
        *extended(MAIN_JOB, AXES),
        *extended(IN_BACKWARD, AXES),
        *extended(ACCUMULATED, AXES),
        *extended(DEFERRED, AXES),
        *extended(HALVES, AXES),
        {**HALVES, **IN_BACKWARD},
        {**HALVES, **DEFERRED},
        {**HALVES, **ACCUMULATED, "gradient_dtype": "bf16"},
        {"dtype": "bf16", "main_weights": "fp32", **DEFERRED},
        {"dtype": "bf16", "loop": "plain", "accumulation": 3, "gradient_dtype": "auto", "budget": "tight"},
        *({**MAIN_JOB, **IN_BACKWARD, "budget": budget} for budget in ("tight", "half", "everything")),
        *({**MAIN_JOB, **DEFERRED, "budget": budget} for budget in ("half", "everything")),
        *({**HALVES, **MAIN_JOB, "budget": budget} for budget in ("half", "everything")),
        *({**MAIN_JOB, "budget": "half", "page": page, "dtype": "bf16"} for page in ("small", "auto")),
        {**MAIN_JOB, **ACCUMULATED, "budget": "tight"},
    ]


def _with_workers(rows: Sequence[Mapping[str, Hashable]]) -> Iterator[Row]:
    """Each row with the number of workers that has met fewest of its values."""
    met: set[tuple[str, Hashable, int]] = set()
    for row in rows:
        workers = max(WORKERS, key=lambda number: sum((name, row[name], number) not in met for name in row))
        met.update((name, value, workers) for name, value in row.items())
        yield Row.of({**row, "workers": workers})


CI_ROWS: tuple[Row, ...] = tuple(_with_workers(covering_rows(AXES, covered_partials())))


def full_rows() -> Iterator[Row]:
    """Every combination of the movement axes, the companions taking turns."""
    combinations = itertools.product(*COMPANION_AXES.values())
    companions = [dict(zip(COMPANION_AXES, values, strict=True)) for values in combinations]
    strides = _strides()
    for digits in itertools.product(*(range(len(values)) for values in MOVEMENT_AXES.values())):
        movement = {name: MOVEMENT_AXES[name][digit] for name, digit in zip(MOVEMENT_AXES, digits, strict=True)}
        turn = sum(digit * stride for digit, stride in zip(digits, strides, strict=True))
        yield Row.of({**movement, **companions[turn % len(companions)], "workers": WORKERS[turn % len(WORKERS)]})


def rows_for(*, full: bool, has_checkpointing: bool) -> list[Row]:
    """The rows to run; for a model without checkpointing they lose that setting."""
    if full:
        return [row for row in full_rows() if has_checkpointing or row.checkpointing == "none"]
    if has_checkpointing:
        return list(CI_ROWS)
    return list(dict.fromkeys(replace(row, checkpointing="none") for row in CI_ROWS))


def _strides() -> list[int]:
    """Steps through the companions that are coprime to their number, so that no axis sees only some of them. Large and
    small ones: else the first values of all axes would meet the first companions only."""
    num_companions = math.prod(len(values) for values in COMPANION_AXES.values())
    coprime = [number for number in range(1, num_companions) if math.gcd(number, num_companions) == 1]
    return coprime[:: len(coprime) // len(MOVEMENT_AXES)][: len(MOVEMENT_AXES)]
