"""Counts micro-batches, steps and samples, and says which micro-batch is the last of its step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from infinity.config import InfinityConfig
from infinity.errors import ConfigError, StepError

COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
"""The attributes that a checkpoint has."""


class Accumulation:
    """The batch sizes, from the config until they are set, and the position within a step.

    Example: with four micro-batches in a step, ``micro_steps`` of 4 to 7 belong to the second step, and the micro-batch that
    begins at 7 is its boundary.

    Attributes:
        batch_size, micro_batch_size: samples of a step on all ranks, and of a micro-batch on one; None: the loader says.
        num_micro_batches: of a step.
        is_managed: whether they are counted; else every `Engine.step` is a boundary.
        boundary: whether the next backward is the last of its step, if the script has said so; None: it is counted.
        is_in_step: whether `Engine.step` runs, with its update.
        is_in_no_sync: inside `no_sync`: gradients are not averaged with other ranks.
        num_backwards: backwards of the present step.
        global_steps, micro_steps, skipped_steps, global_samples: so far.
    """

    def __init__(self, config: InfinityConfig, num_ranks: int) -> None:
        """``num_ranks``: data-parallel ranks."""
        self.batch_size = config.train_batch_size
        self.micro_batch_size = config.train_micro_batch_size_per_gpu
        self.num_micro_batches = config.gradient_accumulation_steps
        self.is_managed = config.managed_gradient_accumulation
        self.boundary: bool | None = None
        self.is_in_step = self.is_in_no_sync = False
        self.num_backwards = 0
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self._num_ranks = num_ranks
        self._counted_from = 0
        """The value of `micro_steps` from which steps are counted: where the number of micro-batches changed last."""

    @property
    def position(self) -> int:
        """How many micro-batches of the present step have passed."""
        return (self.micro_steps - self._counted_from) % self.num_micro_batches

    @property
    def num_unused(self) -> int:
        """How many micro-batches have left gradients that no update has used."""
        # Where the script sets the boundary, it may call `Engine.step` once per step, as accelerate does: `position` then
        # is no micro-batch of a step.
        is_counted = self.is_managed and self.boundary is None
        return self.position if is_counted else self.num_backwards

    def is_boundary(self) -> bool:
        """Whether the present micro-batch is the last of its step."""
        if self.boundary is not None:
            return self.boundary
        return self.position + 1 == self.num_micro_batches if self.is_managed else self.is_in_step

    def begin_step(self) -> None:
        """Uncount the micro-batches of the present step."""
        # Four in a step and micro_steps 6: two have passed, and micro_steps becomes 4.
        self.micro_steps -= self.position

    def abandon_step(self) -> None:
        """Uncount the micro-batches and backwards of the present step."""
        self.begin_step()
        self.num_backwards = 0

    def count_backwards(self, num: int) -> None:
        """``num`` backwards of the present step are done. `Engine.step` follows only the last one."""
        self.num_backwards += num
        # A vertical step of four micro-batches adds 3 here, and `Engine.step` adds the fourth.
        self.micro_steps += num - 1

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Inside the ``with`` block, `Engine.step` runs its update."""
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `Engine.no_sync`."""
        if self.is_in_no_sync:
            problem = "no_sync context manager reentry is unsupported"
            raise StepError.order("engine.no_sync()", problem, cure="One block around all of it does the same")
        self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_in_no_sync = False

    def set_boundary(self, is_boundary: bool | None) -> None:
        """See `Engine.set_gradient_accumulation_boundary`."""
        if not self.is_managed:
            raise StepError.order(
                "engine.set_gradient_accumulation_boundary()",
                "the config says that every engine.step() is a boundary",
                cure='Remove "managed_gradient_accumulation": false',
                step=self.global_steps,
            )
        self.boundary = is_boundary
        if is_boundary is None:
            self.begin_step()

    def set_num_micro_batches(self, num: int) -> None:
        """Set the micro-batches per step.

        Raises:
            ConfigError: fewer than one.
            StepError: the present step has begun.
        """
        if num < 1:
            raise ConfigError.of_batch(f"{num!r} micro-batches per step", cure="Take a whole number from 1 on")
        if self.boundary is None and self.is_managed and self.position:
            raise StepError.order(
                "setting the accumulation steps",
                "some micro-batches of the present step have passed",
                cure="Set them after the engine.step() that ends a step",
                step=self.global_steps,
            )
        # With 4 in a step, micro_steps is 8 when the third step begins. With 3 from now on, 8 is still its first.
        self._counted_from = self.micro_steps - self.position
        self.num_micro_batches = num
        if self.micro_batch_size is not None:
            self.set_micro_batch_size(self.micro_batch_size)

    def set_batch_size(self, size: int) -> None:
        """Set the samples per step. The size of a micro-batch stays the same.

        Raises:
            ConfigError: it is no multiple of the micro-batch.
            StepError: the present step has begun.
        """
        per_round = (self.micro_batch_size or 1) * self._num_ranks
        if self.micro_batch_size is None or size % per_round or size < per_round:
            problem = (
                f"a batch of {size} cannot be divided into micro-batches of {self.micro_batch_size or 'unknown'} samples"
                + (f" on {self._num_ranks} processes" if self._num_ranks > 1 else "")
            )
            raise ConfigError.of_batch(problem, cure='Take a multiple of "train_micro_batch_size_per_gpu"')
        self.set_num_micro_batches(size // per_round)

    def set_micro_batch_size(self, size: int) -> None:
        """Set the samples per micro-batch. The number of micro-batches stays the same."""
        self.micro_batch_size = size
        self.batch_size = size * self.num_micro_batches * self._num_ranks

    def count_samples(self, num_seen: int | None) -> None:
        """Count the samples of a step that has ended.

        ``num_seen``: samples that its micro-batches had, for a config that leaves the batch size open.
        """
        num_samples = self.batch_size
        if not self.is_managed:
            # Without managed accumulation the script decides how many backwards a step has.
            num_samples = (self.micro_batch_size or 0) * self._num_ranks * (self.num_backwards or 1)
        self.global_samples += num_samples or num_seen or 0
        self.num_backwards = 0

    def check_counted(self, call: str) -> None:
        """Raise if micro-batches are not counted, for a call that runs a whole step."""
        if self.boundary is not None:
            problem, cure = "the boundary is set by hand", "Call engine.set_gradient_accumulation_boundary(None) before"
        elif not self.is_managed and self.num_micro_batches > 1:
            problem, cure = "every engine.step() is a boundary", 'Remove "managed_gradient_accumulation": false'
        else:
            return
        raise StepError.order(call, problem, cure=cure, step=self.global_steps)

    def state(self) -> dict[str, int]:
        """For `load_state`."""
        return {name: getattr(self, name) for name in COUNTERS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned. The position in the present step stays: checkpoints have no gradients."""
        position, self._counted_from = self.position, 0
        for name in COUNTERS:
            setattr(self, name, state[name])
        # Loading between micro-batches: this step's own ones count, not those of the saved one.
        self.micro_steps += position - self.position
