"""From gradients to updates: in backward as units become complete, or in the step, at once or when they are needed.

[Note: the order of updates] Updates that are pending when a step ends run beside the next forward, and nothing else
keeps the drive busy in it. So those should be left over that the forward needs last. Backward delivers them first:
therefore, where all weights fit into memory, the update whose unit the next forward needs soonest always comes next,
and the others wait while there is room for their gradients. Where units have to make room for each other, updates run
as they come: a pending one keeps its unit in memory, and those that the forward needs last would be kept at the expense
of those that it needs first. So they do where other ranks wait for the new weights, before the step ends, in the order
in which all ranks update. A unit that is waited for is updated next in any case.
"""
# Example: forward needs units 0 1 2, so backward delivers 2 1 0. Updates by rank: 2 starts, as nothing else is there;
# when it is done, 1 and 0 have come, and 0 goes first. The next forward finds 0 updated, and 1 is updated beside its
# first modules.

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from infinity.config.resolved import InfinityConfig
from infinity.device.compute import ComputeDevice
from infinity.device.host_memory import HeapTrimmer
from infinity.distributed.agreement import digest
from infinity.distributed.meshes import Mesh
from infinity.errors import StepError
from infinity.gradients.gradient_exchange import ShardUpdates
from infinity.gradients.main_gradients import GradientSource
from infinity.gradients.norms import clip_coefficient, norm_of_model
from infinity.gradients.rank_checks import check_all_held, check_same, check_same_groups
from infinity.gradients.reducer import NewGradients, ReducedGradients
from infinity.optim.classes import IS_MOMENTUM
from infinity.optim.groups import Groups
from infinity.paging.parameter_cache import ParameterCache
from infinity.paging.rank_weights import gather_weights
from infinity.tiers.divided_weights import WeightExchange
from infinity.units.layout import Chunk, Slot
from infinity.units.unit import Unit
from infinity.updates.job import UpdateJob
from infinity.updates.momenta import CompressedMomenta
from infinity.updates.step_groups import StepGroups
from infinity.updates.stream import UpdateStream

logger = logging.getLogger(__name__)

# Units below this are updated several together. An update beside backward makes two threads take turns with the
# interpreter: for a few parameters that takes longer than the update.
_LEAST_BYTES = 1 << 20


@dataclass(eq=False, repr=False)
class Stepper:
    """One optimizer step after the other. Gradients come in with `deliver`, and `apply` ends the step.

    Args:
        units: all units, by index.
        chunks: of each unit, those that are updated here.
        config: says when units are updated, and about clipping and overflow.
        device, parameter_cache, gradients, stream, step_groups: whom it works with.
        trimmer: gives memory back between two updates; None: that is not needed.
        exchange: brings the weights that are updated elsewhere.
        mesh: who has which part of the model.
        before_updates: returns when what the step before wrote may be followed by what this one writes.
        momenta: exchanged in place of gradients by some steps; None: by none.
    """

    # All of it is touched under the engine lock only. What is a step's is gone at its end: `_forget`.
    units: Sequence[Unit]
    chunks: Sequence[Sequence[Chunk]]
    config: InfinityConfig
    _: KW_ONLY
    device: ComputeDevice
    parameter_cache: ParameterCache
    trimmer: HeapTrimmer | None
    gradients: ReducedGradients
    stream: UpdateStream
    step_groups: StepGroups
    exchange: WeightExchange
    mesh: Mesh
    before_updates: Callable[[], None] = lambda: None
    momenta: CompressedMomenta | None = None
    _waiting: list[tuple[Unit, dict[Slot, torch.Tensor]]] = field(init=False, default_factory=list)
    """Units to be updated in backward, with their last gradients: from `deliver` until no backward needs their weights."""
    _waiting_bytes: int = field(init=False, default=0)
    """Bytes of those that have come since they were last looked at."""
    _norms: dict[tuple[int, int], torch.Tensor] = field(init=False, default_factory=dict)
    """(unit index, slot index) -> 2-norm of a gradient of the present step: from when it goes into its update."""
    used_up: set[tuple[int, int]] = field(init=False, default_factory=set)
    """(unit index, slot index) of gradients that went into an update in backward, or are left to one."""
    _ranks: dict[int, int] = field(init=False, default_factory=dict)
    """Unit index -> its place in the next forward: from the present step's first update on."""
    _groups: Groups | None = field(init=False, default=None)
    """The groups as they were at the present step's first update."""
    _divisor: int = field(init=False, default=1)
    _are_kept_unclipped: bool = field(init=False, default=False)
    """Whether gradients of the last step are still there, which clipped them on their way into the update."""
    _has_warned: bool = field(init=False, default=False)
    updated: set[int] = field(init=False, default_factory=set)
    """Units whose update in the present step was asked for, or left to their means: in its backward, or in `apply`."""
    _updated_shards: list[Unit] = field(init=False, default_factory=list)
    """Units whose shard this rank updates in the present step's backward, as all ranks have agreed, in their order."""
    grad_norm: torch.Tensor | None = field(init=False, default=None)
    """2-norm of all gradients of the last step, before clipping: 0-dim fp32. From then until the next step."""
    applied_norm: torch.Tensor | None = field(init=False, default=None)
    """`grad_norm` of the last step that updated something."""
    is_skipped: bool = field(init=False, default=False)
    """Whether the last step updated nothing, because its gradients were not finite."""

    def __post_init__(self) -> None:
        self.scaler = self.gradients.scaler
        self.updates_in_backward = self.config.infinity.update == "in_backward"
        """Whether a unit is updated as soon as its gradients are complete."""
        self._clock = self.parameter_cache.clock
        self._is_divided = self.exchange.shards.is_divided
        """Whether other ranks update parts of each unit."""
        self._shard_updates = ShardUpdates(self._update_shard)

    @property
    def is_between_steps(self) -> bool:
        """Whether some weights are already those of the next step, and others those of this one."""
        return bool(self.updated or self._waiting)

    @property
    def _goes_by_rank(self) -> bool:
        """See [Note: the order of updates]."""
        return self.parameter_cache.holds_all and not self._is_divided

    @property
    def updates_all_in_backward(self) -> bool:
        """Whether no weights are left for the step, where backward was told to update units."""
        return self.updates_in_backward and not self._is_divided

    def follow(self, before: Stepper) -> None:
        """The last step was made by ``before``."""
        self.grad_norm, self.applied_norm, self.is_skipped = before.grad_norm, before.applied_norm, before.is_skipped

    def divide_by(self, divisor: int) -> None:
        """The gradients of the present step are divided by it before they are used; see `infinity.loop.style`."""
        self._divisor = divisor

    def begin_last(self, step: int, *, updates_now: bool) -> None:
        """The last ``engine.backward`` of a step begins. ``updates_now``: `deliver` may be told to update units."""
        if not (self.updates_in_backward and self._goes_by_rank):  # else their order depends on how fast each is
            self.stream.expect_again()
        number = 0
        if updates_now and self._is_divided and not self.step_groups.loose.present():
            self._groups = self.step_groups.begin()
            number = digest(self.step_groups.described(self._groups))
        # Exchanged with the gradients of each unit. 0 stands for "no updates in backward": `digest` is above 0.
        self._shard_updates.begin(number)
        if not self.gradients.begin_means(step, self._shard_updates if number else None):
            self._shard_updates.end()

    def deliver(self, unit: Unit, gradients: dict[Slot, torch.Tensor], *, updates_now: bool) -> None:
        """Gradients of a micro-batch, whole per parameter; they belong to the stepper from now on.

        Args:
            unit: whose.
            gradients: of some or all of its parameters.
            updates_now: update the unit, as soon as no backward needs its weights any more.
        """
        self.parameter_cache.await_update(unit)  # an earlier one may still read the unit's gradient memory
        if not updates_now or self._is_divided:
            if self._are_kept_unclipped and not self._has_warned:
                self._warn_of_unclipped(unit)
            self.gradients.add(unit, gradients)
            if updates_now:
                self._update_when_reduced(unit)
            return
        # From here on: while they wait, nobody could be shown what they are.
        self.used_up.update([(unit.index, slot.index) for slot in gradients])
        self._waiting.append((unit, self.gradients.send_ahead(unit, gradients)))
        self._waiting_bytes += unit.num_bytes
        # Where units make room for each other, a unit that waits might leave memory, and be read again for its update.
        if self._waiting_bytes >= _LEAST_BYTES or not self.parameter_cache.holds_all:
            self._update_waiting(only_consistent=True)

    def _warn_of_unclipped(self, unit: Unit) -> None:
        if self.gradients.slots_with_gradient(unit):
            self._has_warned = True
            logger.warning(
                "new gradients are added to those of the step before. gradient_clipping clips inside of the update "
                "and not in p.grad, so the sum differs from that after torch.nn.utils.clip_grad_norm_. Call "
                "optimizer.zero_grad() after each step, or remove gradient_clipping from the config and clip the "
                "gradients yourself"
            )

    def finish_backward(self, *, updates_now: bool) -> None:
        """Backward has ended: update what waited for it, and, if ``updates_now``, all else that has a gradient."""
        self._update_waiting(only_consistent=False)
        if updates_now:
            for unit in self.units:
                if unit.index in self.updated or not self.gradients.slots_with_gradient(unit):
                    continue
                if self._is_divided:
                    self._update_when_reduced(unit)
                    continue
                self.parameter_cache.prepare_update(unit)
                self._waiting.append((unit, {}))
            self._update_waiting(only_consistent=False)

    def _update_when_reduced(self, unit: Unit) -> None:
        """This rank's shard is updated when the mean of it is there; see [Note: updates of shards]."""
        if self._shard_updates.digest:
            slots = self.gradients.slots_with_gradient(unit)
            self._shard_updates.add(unit, slots)
            self.used_up.update((unit.index, slot.index) for slot in slots)
            self.updated.add(unit.index)
            self._trim_heap()

    def _update_shard(self, unit: Unit, source: GradientSource, scale: float) -> None:
        self._updated_shards.append(unit)
        self.parameter_cache.prepare_update(unit)
        self._submit(unit, source, self._factor(None, scale))

    def _update_waiting(self, *, only_consistent: bool) -> None:
        waiting, self._waiting, self._waiting_bytes = deque(self._waiting), [], 0
        try:
            while waiting:
                unit, gradients = waiting[0]
                # In backward a unit waits until no graph needs its weights. When backward has ended, it is updated in
                # any case.
                if only_consistent and not (self.gradients.have_arrived(unit) and unit.unbind_unused()):
                    self._waiting.append(waiting.popleft())
                    continue
                self.parameter_cache.await_update(unit)
                source = self.gradients.add_for_update(unit, gradients, self._norms)
                self.used_up.update([(unit.index, slot.index) for slot in source.slots])
                gradients.clear()
                waiting.popleft()
                self._submit(unit, source, None if self._divisor == 1 else _scalar(1.0 / self._divisor))
                self._trim_heap()
        finally:
            self._waiting += waiting  # after an error: those behind the failed one, whose gradients are used up

    def _trim_heap(self) -> None:
        """Between two units, return freed memory to the system: see `HeapTrimmer`."""
        if self.trimmer is not None:
            self.trimmer.trim()

    def _submit(
        self,
        unit: Unit,
        source: GradientSource,
        coefficient: torch.Tensor | None,
        *,
        is_held: bool = False,
        are_momenta: bool = False,
    ) -> None:
        # A durable run: the last step must be committed before this one writes over it.
        self.before_updates()
        if self._groups is None:
            self._groups = self.step_groups.begin()
        # What is in no group is not updated.
        groups = self._groups.of_each({slot.index: unit.parameters[slot.index] for slot in source.slots})
        # IS_MOMENTUM tells OneBitAdam's update that it gets a momentum in place of a gradient.
        if are_momenta:
            groups = {index: {**group, IS_MOMENTUM: True} for index, group in groups.items()}
        # A user may have written to weights of a unit that is in memory: the update reads them from where weights rest.
        if not unit.num_active:
            self.parameter_cache.store_changes(unit)
        is_seen = unit.flat is not None and unit.flat.has_views
        rank = self._rank_of(unit) if self._goes_by_rank else 0
        job = UpdateJob(
            unit,
            self.chunks[unit.index],
            source,
            groups,
            coefficient,
            self.device.mark(),
            is_held=is_held,
            rank=rank,
            is_shard=self._is_divided,
            uses_flat=self.parameter_cache.holds_all or not self.exchange.divides(unit),
        )
        self.updated.add(unit.index)  # before the update: behind it an interrupt may come
        unit.count_update(groups)
        unit.begin_update(job)
        try:
            if self.updates_in_backward:  # once it is submitted, it may be too late
                self.parameter_cache.attach_wanted(unit)
            self.stream.submit(job)
        except BaseException as error:
            if not self.stream.has(job):  # else it was queued, and an interrupt came after that
                source.release()
                job.finish(error)
                unit.end_update()
            raise
        if source.is_referenced or is_seen:  # somebody looks at gradients or weights, and may at any time
            self.parameter_cache.await_update(unit)

    def apply(self, step: int, *, keeps: bool = False) -> None:
        """The rest of the step: whatever has a gradient and was not updated in backward.

        Or nothing at all, see `is_skipped`.

        Args:
            step: its number, for messages.
            keeps: gradients stay until somebody drops them, as torch's do.

        Raises:
            StepError: hyperparameters changed since the first update in backward.
            RankError: other ranks have other gradients, or are not there. Nothing has been updated.
        """
        # All ranks exchange the following in one order, so the checks come before what only some ranks do. The step
        # updates nothing until the last check has passed.
        was_in_backward = bool(self.updated)
        momenta: CompressedMomenta | None = None  # exchanged in place of gradients by this step
        new: list[NewGradients] = []
        if self.momenta is not None and self.momenta.is_active():
            # Past the warm-up of OneBitAdam no means are computed before the step, unless a parameter has yet to warm
            # up.
            new = self.gradients.new_of_all(step)
            if self.momenta.is_due(new):
                momenta, keeps = self.momenta, False
            else:
                self.gradients.average_these(new, step)
        elif keeps:
            self.gradients.average(step)  # what no backward did
        else:
            self.gradients.average_for_update(step)
        check_all_held(self.mesh.data, self.step_groups.loose.present(), step)
        # Without updates in backward the groups are read here: until now you may change hyperparameters.
        if not was_in_backward:
            self._groups = self.step_groups.begin()
        groups = self._groups or self.step_groups.begin()
        with_gradients = [unit for unit in self._in_forward_order() if self.gradients.slots_with_gradient(unit)]
        # Norms of means of which this rank has a shard only. Those of gradients updated in backward are there already.
        self._norms.update(self.gradients.agreed_norms)
        for unit in with_gradients:
            for index, norm in self.gradients.norms_of(unit).items():
                self._norms[unit.index, index] = norm
        if was_in_backward:
            self._check_groups_unchanged(step)
        check_same_groups(self.mesh.data, functools.partial(self.step_groups.described, groups), step)
        # The norms need one scale for all gradients: it is divided out of the total norm.
        scale = self._common_scale(with_gradients)
        norms = self.step_groups.norms_in_order(self._norms, scale / self.scaler.scale, is_divided=self.mesh.is_divided)
        norm = norm_of_model(self.mesh, norms, scale * self._divisor, step)
        # With momenta, norms are each rank's own and may differ; the largest decides whether all skip the step.
        if momenta is None:
            check_same(self.mesh.data, norm, step)
            self.grad_norm = norm
        else:
            self.grad_norm = momenta.largest(norm, step)
        # `bool` waits for a GPU: only where the config has overflow checked, as with fp16.
        self.is_skipped = self.config.checks_overflow and not bool(torch.isfinite(self.grad_norm))
        if self.is_skipped:
            self.clear()
            self.parameter_cache.pump()
            return
        self.applied_norm = self.grad_norm
        coefficient = None
        if self.config.gradient_clipping > 0:
            coefficient = clip_coefficient(norm, self.config.gradient_clipping)
            self._are_kept_unclipped = keeps  # the update clips what it reads, not what is kept
        if momenta is not None:
            momenta.exchange(self.gradients, new, functools.partial(self._factor, coefficient), step)
            # Momenta hold clipped and unscaled gradients, so their update multiplies with nothing.
            coefficient, self._divisor = None, 1
            with_gradients = [unit for unit in self._in_forward_order() if self.gradients.slots_with_gradient(unit)]
        # A held update waits until its unit is needed, and leaves the new weights in the buffer, which saves a read.
        # With updates in backward, buffers and order follow from those.
        is_held = self.parameter_cache.fills and not was_in_backward and self.config.infinity.update != "step"
        self.step_groups.loose.update(groups, self._factor(coefficient, self.scaler.scale))
        for unit in with_gradients:
            self.parameter_cache.prepare_update(unit)
            factor = self._factor(coefficient, self.gradients.scale_of(unit)) if momenta is None else None
            source = self.gradients.source(unit, keeps=keeps)
            self._submit(unit, source, factor, is_held=is_held, are_momenta=momenta is not None)
        # Group counters (of classes that count in their groups) change once, after all parameters were submitted.
        self.step_groups.advance(groups, self._norms)
        if self._is_divided:  # in the order of their updates, as far as there is one that all ranks know
            others = (unit for unit in self.units if unit.index in self.updated)
            gather_weights(self.parameter_cache, list(dict.fromkeys([*self._updated_shards, *others])))
        # Before waiting for updates: an interrupt there must find a step that is over.
        self._forget()
        if self.config.infinity.update == "step":
            with self._clock.waiting("update"):
                self.stream.drain()
        if not was_in_backward or self._is_divided:
            self.parameter_cache.pump()

    def _factor(self, coefficient: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """The factor for gradients of this loss scale: clips them, and divides by scale and `_divisor`. None: 1."""
        factor = scale * self._divisor
        if factor == 1.0 and not self.scaler.is_active:
            return coefficient
        return (1.0 if coefficient is None else coefficient) / _scalar(factor)

    def _common_scale(self, units: Sequence[Unit]) -> float:
        """Bring the norms of the units' gradients to one scale; returns it."""
        scales = {unit.index: self.gradients.scale_of(unit) for unit in units}
        if len({*scales.values()}) < 2:
            return scales.popitem()[1] if scales else self.scaler.scale
        # Some units were looked at, which took the scale out of their gradients.
        for key, norm in self._norms.items():
            self._norms[key] = norm / scales.get(key[0], 1.0)
        return 1.0

    def _rank_of(self, unit: Unit) -> int:
        """The unit's place in the next forward."""
        if not self._ranks:
            self._ranks = {each.index: rank for rank, each in enumerate(self._in_forward_order())}
        return self._ranks[unit.index]

    def _in_forward_order(self) -> list[Unit]:
        return [self.units[index] for index in self.parameter_cache.training_schedule.forward_order(len(self.units))]

    def _check_groups_unchanged(self, step: int) -> None:
        changed = self.step_groups.read().changed_since(self._groups) if self._groups is not None else []
        if not changed:
            return
        raise StepError.partial_update(
            step=step,
            num_updated=len(self.updated),
            num_units=len(self.units),
            problem=f"the optimizer's {', '.join(changed)} changed between engine.backward() and engine.step()",
            cure="Set them before engine.backward(), or set config key 'infinity.update' to \"deferred\"",
        )

    def _forget(self) -> None:
        self._norms.clear()
        self._ranks.clear()
        self._groups = None
        self._divisor = 1
        self.updated.clear()
        self._updated_shards.clear()
        self.used_up.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._shard_updates.end()

    def clear(self, kept: Collection[tuple[int, int]] = ()) -> None:
        """Forget the present step and all gradients, but for those ``kept``, by (unit index, slot index)."""
        self._are_kept_unclipped = False
        self._forget()
        self.gradients.clear(kept)

    def abandon(self) -> None:
        """As `clear`. If shards may have been updated in the present step's backward, or in stage 3 in the step, all ranks come
        here: they update the same of them, and gather the weights.

        Raises:
            RankError: another rank has ended, does not come, or is elsewhere.
        """
        has_begun = self._shard_updates.digest != 0  # the last backward of the step, in which units are updated
        if has_begun:
            self.gradients.finish_shard_updates()
        has_changed = has_begun or (self.exchange.is_divided and bool(self.updated))
        self.clear()
        if has_changed:
            gather_weights(self.parameter_cache, self.units)

    def close(self) -> None:
        """Drop the step and all gradients, and return their memory."""
        self._forget()
        self.gradients.close()


def _scalar(value: float) -> torch.Tensor:
    """0-dim fp32 on the CPU, whatever default dtype and device the user has set."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")
