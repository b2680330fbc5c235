"""Reads and changes weights and optimizer states from outside the training loop. The engine flushes updates first."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.arrays import ElementsInOrder
from infinity.checkpoint.record_stream import GatheredStream, RecordStream
from infinity.checkpoint.stored_weights import PART_NUMEL, StoredWeights
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.numerics.chunk_format import WEIGHT
from infinity.numerics.remainder import split_bits
from infinity.optim.facade.state_loader import check_values
from infinity.paging.parameter_map import ParameterMap
from infinity.paging.rank_weights import gather_weights
from infinity.units.layout import Slot, in_memory_order
from infinity.units.parameter import release_parameters
from infinity.units.unit import Unit
from infinity.updates.job import ParameterState
from swapper.sync.interrupts import uninterrupted

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StateAccess:
    """Reads and changes stored weights and states, parameter by parameter, in bounded memory."""

    _parameter_map: ParameterMap
    _coordinator: ParameterCoordinator
    _stored: StoredWeights
    """Its exchange brings what other ranks keep. If ranks keep shards, all ranks make the calls that read or replace main
    weights and states, in the same order."""
    _elements_follow = False

    def __post_init__(self) -> None:
        self._exchange = exchange = self._stored.exchange
        self.has_main_weights = self._stored.has_main_weights
        """Whether main weights differ from model weights: they do not if the model is fp32."""
        self.is_divided = exchange.shards.is_divided and self.has_main_weights
        """Whether ranks keep shards of the main weights, so that one rank alone cannot read them."""
        self.copies = self._coordinator.copies
        """Makes the copies that callers get: large ones in files."""
        self.stream = self._stored.stream
        """Reads or replaces all of a unit in one pass."""
        self.gathered_stream: GatheredStream | None = None
        """The same over the shards of all ranks; None if each rank keeps everything."""
        if exchange.shards.is_divided:
            self.gathered_stream = GatheredStream(
                self.stream,
                exchange.shards,
                exchange.ranks,
                self._coordinator.parameter_cache,
                lambda unit, slot: self._read(unit, [(slot, WEIGHT)]),
            )

    # ---------------------------------------------------------------------------------------------------------- reading

    def main_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the fp32 main weight, on the CPU, of the parameter's shape. Frozen: of its weight, as fp32."""
        unit, slot = self._parameter_map.locate(parameter)
        return self.main_weights(unit, [slot])[slot.index]

    def main_weights(self, unit: Unit, slots: Sequence[Slot]) -> dict[int, torch.Tensor]:
        """Slot index -> the same, for some parameters of a unit. Each record is read once."""
        recorded = [slot for slot in slots if self.has_main_weights and slot.spec.is_trainable]
        found = {slot.index: self._model_weight(unit, slot) for slot in slots if slot not in recorded}
        for slots in [[slot] for slot in recorded] if self.gathered_stream is not None else [recorded]:
            with self.gathered_stream.reading(unit, slots) if self.gathered_stream else contextlib.nullcontext():
                read = self._read(unit, [(slot, WEIGHT) for slot in slots])
            found |= {index: values for (index, _), values in read.items()}
        return found

    def _model_weight(self, unit: Unit, slot: Slot) -> torch.Tensor:
        with self.copies.new(slot.spec.shape, slot.spec.stride, torch.float32) as made, self._coordinator.opened(unit):
            weight = in_memory_order(unit.weight(slot), slot)
            for start in range(0, slot.numel, PART_NUMEL):
                made.write(start, weight[start : start + PART_NUMEL].to("cpu", torch.float32))
            return made.finish()

    def _read(self, unit: Unit, wanted: Sequence[tuple[Slot, str]]) -> dict[tuple[int, str], torch.Tensor]:
        """(slot index, kind) -> a copy of the main weight (`WEIGHT`) or the state. Each record is read once."""
        with contextlib.ExitStack() as stack:
            made = {}
            for slot, kind in wanted:
                copy = self.copies.new(slot.spec.shape, slot.spec.stride, torch.float32)
                made[slot.index, kind] = stack.enter_context(copy)
            # Small parameters share chunks: each is read once.
            parts = self.stream.parts([unit], only=made)
            with contextlib.closing(parts):
                for part in parts:
                    made[part.slot.index, part.kind].write(part.start, part.values)
            found = {key: copy.finish() for key, copy in made.items()}
        for slot, kind in wanted:
            what = "the main weight" if kind == WEIGHT else kind
            self._complete(f"{what} of '{slot.spec.fqn}'", unit, slot, found[slot.index, kind])
        return found

    def _complete(self, what: str, unit: Unit, slot: Slot, values: torch.Tensor) -> None:
        """Fill in the other ranks' shards: ``values`` (fp32, of the parameter's shape) has only this rank's."""
        shards, ranks = self._exchange.shards, self._exchange.ranks
        if shards.is_divided:
            ranks.all_gather_ints(what)
            parts = shards.parts_of_parameter(unit, slot)
            ranks.all_gather_in_memory(what, in_memory_order(values, slot), parts, kind="states")

    def has_place(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has room for optimizer state: it was trainable in `initialize`."""
        return self._state_of(parameter) is not None

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has optimizer state, from an update or a load. An updated main weight counts."""
        state = self._state_of(parameter)
        if state is None:
            return False
        if state.is_fresh:
            unit, _ = self._parameter_map.locate(parameter)
            self._coordinator.parameter_cache.await_update(unit)  # it may be the first one
        return not state.is_fresh or (self.has_main_weights and state.num_updates > 0)

    def _state_of(self, parameter: torch.Tensor) -> ParameterState | None:
        unit, slot = self._parameter_map.locate(parameter)
        return self.stream.states.get((unit.index, slot.index))

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's optimizer state, as torch keeps it; empty before its first update."""
        unit, slot = self._parameter_map.locate(parameter)
        read = self._read(unit, [(slot, name) for name in self.stream.names_of(unit, slot)])
        return {**self.scalars(parameter), **{name: values for (_, name), values in read.items()}}

    def scalars(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of a parameter's states that are not per element ("step"); empty before its first update."""
        state = self._state_of(parameter)
        if state is None or state.is_fresh:
            return {}
        return _copies(state.scalars)

    # --------------------------------------------------------------------------------------------------------- modifying

    def load_state(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replace a parameter's optimizer state: tensors of its shape, and scalars.

        Values that `state` returned are stored without another rounding.

        Raises:
            ValueError: a shape or a name does not fit; nothing has been changed.
        """
        unit, slot = self._parameter_map.locate(parameter)
        state = self.stream.states.get((unit.index, slot.index))
        if state is None:
            if values:
                raise ValueError(
                    f"'{slot.spec.fqn}' was frozen in infinity.initialize, so no space was reserved for its state. "
                    "Add it with optimizer.add_param_group"
                )
            return
        self._stored.wait_for_save(unit)
        names = self.stream.records.names_of(unit)
        check_values(slot.spec.fqn, slot.spec.shape, values, names)
        # Stochastic rounding of states draws its random numbers by this count, so a loaded state goes on with the same
        # ones.
        num_updates = int(values.get("step", 0))
        tensors = {name: value for name, value in values.items() if name in names and isinstance(value, torch.Tensor)}
        scalars = _copies({name: value for name, value in values.items() if name not in tensors})
        state.load(scalars, tuple(tensors) if values else None, num_updates)
        if self._elements_follow:
            return
        self.stream.fill(unit, {(slot.index, name): _elements(tensor, slot) for name, tensor in tensors.items()})

    @contextlib.contextmanager
    def elements_following(self) -> Iterator[None]:
        """Inside the ``with`` block, `load_state` loads scalars only. The caller fills in the elements later."""
        self._elements_follow = True
        try:
            yield
        finally:
            self._elements_follow = False

    @contextlib.contextmanager
    def replacing(self, unit: Unit) -> Iterator[RecordStream]:
        """The caller replaces the unit's main weights and states by `stream` inside the ``with`` block."""
        self._stored.wait_for_save(unit)
        with self._coordinator.replacing(unit):
            yield self.stream

    def load_main_weight(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a parameter's main weight (for a frozen one, its weight); the model weight becomes its cast.

        Raises:
            ValueError: ``values`` has another shape; nothing has been changed.
        """
        unit, slot = self._parameter_map.locate(parameter)
        if tuple(values.shape) != tuple(slot.spec.shape):
            raise ValueError(
                f"the main weight for '{slot.spec.fqn}' has shape {tuple(values.shape)}, not {tuple(slot.spec.shape)}"
            )
        self._stored.wait_for_save(unit)
        with self._coordinator.opened(unit):
            self._coordinator.parameter_cache.remember(unit, slot)
            place = unit.weight(slot)
            if not self.has_main_weights or not slot.spec.is_trainable:
                place.copy_(values)
                self._stored.store_modified(unit, [slot])
                return
            # `fill` also writes the cast into the open flat buffer. A graph over the old weights must not be used any
            # more, and other ranks must not fetch them meanwhile.
            unit.outdate()
            self._exchange.before(unit)
            self.stream.fill(unit, {(slot.index, WEIGHT): _elements(values, slot)})
            gather_weights(self._coordinator.parameter_cache, [unit])

    def resume_main_weight(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Load a saved main weight where the current weight is its cast. Other elements were changed, and stay."""
        _, slot = self._parameter_map.locate(parameter)
        if not self.has_main_weights or tuple(values.shape) != tuple(slot.spec.shape):
            return
        came, main = self.main_weight(parameter), values.cpu()
        # Two roundings to bf16 differ at ties: torch rounds to even, `split_bits` away from zero. Either may have made
        # the weight that came. With main = 1.00390625 (halfway between bf16's 1.0 and 1.0078125): torch gives 1.0,
        # `split_bits` 1.0078125.
        casts = [main.to(slot.spec.dtype).float()]
        if slot.spec.dtype == torch.bfloat16:
            casts.append(split_bits(main.contiguous())[0].view(torch.bfloat16).float())
        is_same = functools.reduce(torch.logical_or, [cast == came for cast in casts])
        self.load_main_weight(parameter, torch.where(is_same, main, came))

    def restore(self, *, on_drives: bool = False) -> None:
        """Make the parameters ordinary again, with memory of their own. ``on_drives``: large ones in files."""
        units = self._parameter_map.units

        def copy_of(unit: Unit, slot: Slot) -> torch.Tensor:
            if not on_drives:
                return self._coordinator.copy_of(unit, slot)
            with self._coordinator.opened(unit):
                return self.copies.copy(unit.weight(slot).cpu())

        # All copies are made first, since a read may fail. Then all parameters change at once: Ctrl-C must not leave
        # some of them paged.
        copies = [[copy_of(unit, slot) for slot in unit.layout.slots] for unit in units]

        with uninterrupted():
            for unit, values in zip(units, copies, strict=True):
                unit.unbind()  # it may be gathered
                for slot, parameter, value in zip(unit.layout.slots, unit.parameters, values, strict=True):
                    release_parameters([parameter])
                    parameter.data = value
                    unit.redirect_views(slot, value)

    def stored(self, parameter: torch.Tensor) -> torch.Tensor:
        """A trainable parameter's main weight, on the CPU; a frozen one's weight, in its own dtype."""
        unit, slot = self._parameter_map.locate(parameter)
        # The caller gives weights back after a failure, maybe on this rank alone. A meeting of ranks might wait
        # forever, so it takes the model weight, which needs none.
        if self.is_divided and slot.spec.is_trainable:
            logger.warning(
                "'%s' is returned as its %s model weight, because reading its main weight needs the other ranks",
                slot.spec.fqn,
                slot.spec.dtype,
            )
            return self._coordinator.copy_for_user(unit, slot)
        return self.main_weight(parameter) if slot.spec.is_trainable else self._coordinator.copy_for_user(unit, slot)

    @contextlib.contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], *, compares: bool = False) -> Iterator[None]:
        """Open the parameters' units, and keep them open inside the ``with`` block. At its end, store what was changed.

        Args:
            parameters: whose.
            compares: find changes by checksums of the contents, however they were written. Otherwise, by torch's
                version counters.

        Raises:
            BudgetTooSmallError: they do not fit into memory together.
        """
        units: dict[int, Unit] = {}
        for parameter in parameters:
            unit, _ = self._parameter_map.locate_any(parameter)
            self._stored.wait_for_save(unit)
            units[unit.index] = unit
        self._coordinator.parameter_cache.check_room(units.values())
        # All units are released, also if opening or storing one of them fails.
        with contextlib.ExitStack() as released:
            for unit in units.values():
                with self._coordinator.held([unit]):
                    gathered = self._stored.begin_gathering(unit, compares=compares)
                    released.callback(self._stored.end_gathering, gathered)
                    unit.hold_gathered(gathered)  # for longer than this block
            try:
                yield
            finally:
                self._stored.before_writes()
                for unit in units.values():
                    if unit.flat is not None:  # else the engine was closed meanwhile
                        self._stored.store_gathered(unit)


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def _elements(values: torch.Tensor, slot: Slot) -> ElementsInOrder:
    return ElementsInOrder(iter([(0, in_memory_order(values, slot).cpu())]))
