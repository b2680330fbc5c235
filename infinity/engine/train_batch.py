"""``engine.train_batch``: all micro-batches of a step, vertically if possible, else one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.loop.batches import call_with, copied, loss_of, move
from infinity.metrics.reporter import Reporter
from infinity.vertical.schedule import VerticalSchedule
from infinity.vertical.step import StepOptions
from swapper.sync.interrupts import uninterrupted

LossFunction = Callable[[Any, Any], torch.Tensor]
"""(output of the model, batch) -> loss."""


@dataclass(eq=False)
class TrainBatch:
    """Runs whole steps."""

    _loop: Any
    """The engine."""
    _vertical: VerticalSchedule
    """The schedule over all micro-batches."""
    _reporter: Reporter
    """Records losses, the order of the present step, and why it is not the vertical one."""

    def __call__(self, batches: Iterator[Any], loss_fn: LossFunction | None) -> torch.Tensor:
        """See `Engine.train_batch`."""
        loop = self._loop
        if not loop.module.training:  # as DeepSpeed
            loop.module.train()
        num_micro_batches = loop.counts.num_micro_batches
        # Batches that were read for a vertical step. If that cannot be done, the ordinary loop uses them.
        taken: list[Any] = []
        # Why this step cannot go vertically; None: it can.
        begun = "the step was begun with engine.backward" if loop.counts.position else None
        reason = begun or self._vertical.obstacle()
        if reason is None:
            for _ in range(num_micro_batches):
                batch = move(next(batches), loop.device)
                # All of them are in memory at once, and a loader may reuse its buffers for the next batch.
                taken.append(copied(batch) if num_micro_batches > 1 else batch)
            # A list of losses, or in words why this step cannot go vertically; then nothing has changed.
            options = StepOptions(loop.global_steps, num_micro_batches)
            found = self._vertical.run([self._run_of(batch, loss_fn) for batch in taken], options)
            if isinstance(found, list):
                with uninterrupted():
                    self.on_vertical_step(found)
                    loop.counts.count_backwards(num_micro_batches)
                    loop.step()
                return torch.stack([loss.float() for loss in found]).mean()
            reason = found
        taken_anew = bool(taken)
        self._reporter.on_schedule("ordinary", reason)
        losses: list[torch.Tensor] = []
        try:
            self._run_in_order(batches, taken, loss_fn, losses)
        except Exception:
            # A model that fails in both orders has a fault of its own: the vertical one is tried again next time.
            if taken_anew:
                self._vertical.forgive()  # it was not the order's fault
            raise
        return torch.stack(losses).mean()

    def on_vertical_step(self, losses: Sequence[torch.Tensor]) -> None:
        """Forward and backward of the present step went vertically."""
        self._reporter.on_schedule("vertical", "")
        for loss in losses:
            self._reporter.on_loss(loss, self._loop.global_steps)

    def evaluate(
        self, batches: Any, loss_fn: LossFunction | None, num_batches: int | None, returns: str | None
    ) -> tuple[Any, list[Any]]:
        """See `Engine.eval_batch`; returns losses ("avg": their mean, None: their list) or "outputs", and the outputs."""
        if returns not in ("avg", "outputs", None):
            raise ValueError(f'reduce_output is "avg" or None, not {returns!r}')
        loop = self._loop
        if not isinstance(batches, Iterator):
            batches, num_batches = iter([batches]), 1
        outputs: list[Any] = []
        losses: list[torch.Tensor] = []
        # DeepSpeed leaves the model in evaluation mode. Here each module's mode is put back, also that of a frozen
        # part.
        modes = {module: module.training for module in loop.module.modules()}
        # Also finishes pending updates.
        loop.eval()
        try:
            with torch.no_grad():
                for _ in range(num_batches or loop.counts.num_micro_batches):
                    batch = move(next(batches), loop.device)
                    outputs.append(call_with(loop, batch))
                    if returns != "outputs":
                        losses.append(_loss(outputs[-1], batch, loss_fn).float())
        finally:
            for module, mode in modes.items():
                module.training = mode
        if returns == "outputs":
            return outputs, outputs
        return torch.stack(losses).mean() if returns == "avg" else losses, outputs

    def _run_in_order(
        self, iterator: Iterator[Any], taken: list[Any], loss_fn: LossFunction | None, losses: list[torch.Tensor]
    ) -> None:
        loop = self._loop
        # A script may have run the first micro-batches of this step itself. Then their gradients are not dropped on an
        # error.
        begins_step = not loop.counts.position
        for _ in range(loop.counts.num_micro_batches):
            try:
                batch = taken.pop(0) if taken else move(next(iterator), loop.device)
                loss = _loss(call_with(loop, batch), batch, loss_fn)
                losses.append(loss.detach().float())
                loop.backward(loss)
            except BaseException:
                if begins_step:
                    loop.forget_step()
                raise
            loop.step()

    def _run_of(self, batch: Any, loss_fn: LossFunction | None) -> Callable[[], torch.Tensor]:
        return lambda: _loss(call_with(self._loop.run_module, batch), batch, loss_fn)


def _loss(output: Any, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    return loss_of(output) if loss_fn is None else loss_fn(output, batch)
