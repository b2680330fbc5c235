"""A Trainer's accumulated micro-batches in the engine's vertical schedule, so that weights are read once per step.

A step with 3 micro-batches, as the Trainer calls it and as it runs here:

    get_batch_samples      returns batches 0, 1, 2
    training_step(0)       runs the Trainer's training_step of all three, each in its own thread (`infinity.vertical`):
                           all embeddings, block 0 for all, block 1 for all, ..., all losses, then backward likewise
    training_step(1)       returns the result of 1
    training_step(2)       returns the result of 2

A subclass's ``training_step`` and ``compute_loss`` run as before, but interleaved. `_Attributes` checks that no
micro-batch sees what another one has assigned to the Trainer.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from typing import Any

from transformers import Trainer, TrainerCallback

from infinity.activations.unsupported import NeverSupportedSchedule
from infinity.errors import StepError
from infinity.integrations.accelerate import EngineOptimizer
from infinity.loop.batches import copied
from infinity.vertical.call import is_same


class MicroBatches:
    """Replaces a Trainer's ``get_batch_samples`` and ``training_step`` while it trains."""

    def __init__(self, trainer: Any, records: Collection[str]) -> None:
        """
        Args:
            records: names of the Trainer's attributes that its steps only add to, such as lists of metrics.
        """
        self._trainer = trainer
        self._records = frozenset(records)
        self._fetch: Callable[..., Any] = trainer.get_batch_samples
        self._step: Callable[..., Any] = trainer.training_step
        self._fetched: list[Any] = []
        self._is_short = False
        self._computed: list[tuple[Any, Any]] = []
        """Pairs (batch, result) that are computed, and that the Trainer has yet to ask for."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        found = self._fetch(epoch_iterator, num_batches, *args, **kwargs)
        self._fetched = list(found[0])
        self._is_short = len(self._fetched) < num_batches
        self._computed.clear()  # of a step that the Trainer has left early
        return found

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. With a step's first micro-batch, it computes all of them if that is possible."""
        # A later micro-batch of a step that is already computed.
        if self._computed:
            batch, returned = self._computed.pop(0)
            if batch is not inputs:
                raise StepError.order(
                    "training_step",
                    "its inputs are not the next batch of get_batch_samples, and all batches of this step are "
                    "already computed",
                    cure='Set config key "infinity.schedule" to "ordinary"',
                )
            return returned
        batches, self._fetched = self._fetched, []
        if len(batches) > 1 and inputs is batches[0]:
            returned_by_all = self._run(batches, lambda batch: self._step(model, batch, *args, **kwargs))
            if returned_by_all is not None:
                self._computed = list(zip(batches, returned_by_all, strict=True))[1:]
                return returned_by_all[0]
        return self._step(model, inputs, *args, **kwargs)

    def _run(self, batches: list[Any], step: Callable[[Any], Any]) -> list[Any] | None:
        trainer = self._trainer
        optimizer = trainer.optimizer
        if not isinstance(optimizer, EngineOptimizer):
            return None
        obstacle = self._obstacle()
        if obstacle is not None:
            optimizer.engine.on_ordinary_step(obstacle)
            return None
        trainer.model.train()  # as each training_step does
        returned: list[Any] = [None] * len(batches)
        before: list[_Attributes] = []

        def run(index: int) -> None:
            if not before:
                before.append(_Attributes(trainer, self._records))
            returned[index] = step(copied(batches[index]))
            if index == len(batches) - 1:
                before[0].check()

        if optimizer.backward_together([functools.partial(run, index) for index in range(len(batches))]):
            return returned
        # The vertical schedule was refused on the way. The caller runs the micro-batches one by one, so what these
        # attempts have assigned is taken back.
        for attributes in before:
            attributes.restore()
        return None

    def _obstacle(self) -> str | None:
        trainer = self._trainer
        if self._is_short or trainer.accelerator.sync_gradients:
            return "the data ended within a step"
        if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
            return f"{type(trainer).__name__} has a _prepare_inputs of its own, which may use the model"
        for callback in trainer.callback_handler.callbacks:
            if type(callback).on_substep_end is not TrainerCallback.on_substep_end:
                return f"{type(callback).__name__}.on_substep_end is called after each micro-batch"
        return None


class _Attributes:
    """A shallow snapshot of the attributes of a Trainer, its state and its control."""

    def __init__(self, trainer: Any, records: Collection[str]) -> None:
        """``records``: see `MicroBatches`. Their values are copied deeply."""
        self._homes = [
            (type(each).__name__, vars(each), dict(vars(each))) for each in (trainer, trainer.state, trainer.control)
        ]
        own = vars(trainer)
        self._records = {name: copy.deepcopy(own[name]) if name in own else None for name in records}

    def check(self) -> None:
        """Raise `NeverSupportedSchedule` if an attribute other than the records has changed."""
        for name, now, before in self._homes:
            for key in {*now, *before} - self._records.keys():
                if key not in now or key not in before or not is_same([before[key]], [now[key]]):
                    raise NeverSupportedSchedule(
                        f"a step changes {name}.{key}, and another micro-batch may look at it (if none does, add its name to "
                        "step_records)"
                    )

    def restore(self) -> None:
        """Restore the snapshot."""
        for _, now, before in self._homes:
            for key in [key for key in now if key not in before]:
                del now[key]
            now.update(before)
        _, own, before = self._homes[0]
        own.update((name, value) for name, value in self._records.items() if name in before)
