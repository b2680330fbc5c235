"""Weights and optimizer state from outside the training loop: read, modified, exported.

Knows units, records and weights at rest; must not be used while updates are pending (the engine flushes first).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.device import ComputeDevice
from infinity.holding import ModelHolding
from infinity.layout import Chunk, Piece, Slot
from infinity.pager import Pager
from infinity.parameter import PagedParameter, let_go
from infinity.records import Lease, RecordStore
from infinity.unit import Unit
from infinity.update_job import ParameterState
from infinity.weights import WeightStore
from infinity.workspace import MainWeight, RecordFormat, Workspace


@dataclass(frozen=True)
class Gathered:
    """A unit that is held open for the user, and what is needed to see what he changed."""

    unit: Unit
    checksums: dict[int, int]
    """Of each slot's weights before."""
    kept: torch.Tensor | None
    """A copy of the trainable segment before, where it is needed."""


class StateAccess:
    """Reads and changes what rests in the tiers, parameter by parameter, in bounded memory."""

    def __init__(
        self,
        holding: ModelHolding,
        pager: Pager,
        records: RecordStore,
        weights: WeightStore | None,
        device: ComputeDevice,
        states: dict[tuple[int, int], ParameterState],
        chunks: Sequence[Sequence[Chunk]],
        record_format: RecordFormat,
    ) -> None:
        self._holding = holding
        self._pager = pager
        self._records = records
        self._weights = weights
        self._device = device
        self._states = states
        self._chunks = chunks
        self._has_main_in_records = record_format.main is not MainWeight.MODEL_WEIGHT
        self._has_halves = record_format.main is MainWeight.REMAINDER

    # ----------------------------------------------------------------------------------------------------- initialising

    def store(self, unit: Unit, originals: Sequence[torch.Tensor]) -> None:
        """Bring a unit under the engine: weights cast into its flat buffer and stored, main weights into the records.

        Args:
            unit: its ``flat`` is allocated and empty.
            originals: the parameters' values as passed to `initialize`, one per slot.
        """
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} has no flat buffer")
        base = unit.flat.tensor()
        base.zero_()
        for slot, original in zip(unit.layout.slots, originals, strict=True):
            unit.view(base, slot).copy_(original)
        if self._has_main_in_records:
            for chunk in self._chunks[unit.index]:
                self._store_main(unit, chunk, originals)
        self._write_weights(unit, base)

    def _store_main(self, unit: Unit, chunk: Chunk, originals: Sequence[torch.Tensor]) -> None:
        """Main weights into a fresh record; model weights that are one half of them into the unit's buffer."""
        lease = self._open(unit, chunk)
        workspace = lease.workspace
        for piece in chunk.pieces:
            original = _in_memory_order(originals[piece.slot.index], piece.slot)
            workspace.write_main(_span(piece), original[piece.start : piece.stop])
            if self._has_halves and unit.flat is not None:
                flat = unit.trainable_view(unit.flat.tensor())[chunk.start : chunk.stop]
                flat[_span(piece)].copy_(workspace.weight[_span(piece)])
        lease.write_back([], main_only=True)

    def _write_weights(self, unit: Unit, base: torch.Tensor) -> None:
        if self._weights is None or unit.stays_resident:
            return
        if base.device.type != "cpu":
            base = base.cpu()
        written = self._weights.write_all(unit, base)
        if written is not None:
            written.wait()

    def _open(self, unit: Unit, chunk: Chunk) -> Lease:
        lease = self._records.open(unit, chunk, is_blocking=True)
        if lease is None:
            raise RuntimeError("a blocking lease gave nothing")
        lease.wait()
        return lease

    # ---------------------------------------------------------------------------------------------------------- reading

    def _pieces(self, unit: Unit, slot: Slot) -> Iterator[tuple[Chunk, Piece]]:
        for chunk in self._chunks[unit.index]:
            for piece in chunk.pieces:
                if piece.slot.index == slot.index:
                    yield chunk, piece

    def main_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of the fp32 main weight (for a frozen parameter, of its weight), on the CPU, with the parameter's shape."""
        unit, slot = self._holding.locate(parameter)
        result = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=torch.float32)
        if not self._has_main_in_records or not slot.spec.is_trainable:
            return result.copy_(self._pager.copy_of(unit, slot))
        for chunk, piece in self._pieces(unit, slot):
            lease = self._open(unit, chunk)
            try:
                if self._has_halves:
                    self._bring_weights(unit, chunk, lease.workspace)
                lease.workspace.read_main(_span(piece), _flat(result)[piece.start : piece.stop])
            finally:
                lease.discard()
        return result

    def _bring_weights(self, unit: Unit, chunk: Chunk, workspace: Workspace) -> None:
        """The chunk's model weights, as they rest, into the workspace."""
        if self._weights is not None and not unit.stays_resident:
            read = self._weights.read_chunk(unit, chunk, workspace.weight)
            if read is not None:
                read.wait()
        elif unit.flat is not None:
            workspace.weight.copy_(unit.trainable_view(unit.flat.tensor())[chunk.start : chunk.stop])
        else:
            raise RuntimeError(f"unit {unit.name} has no weights")

    def has_state(self, parameter: torch.Tensor) -> bool:
        """Whether an update or a load has given the parameter optimizer state."""
        unit, slot = self._holding.locate(parameter)
        state = self._states.get((unit.index, slot.index))
        if state is not None and state.is_fresh:
            self._pager.await_update(unit)  # its first may be pending
        return state is not None and not state.is_fresh

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Copies of the optimizer's state of a parameter, as torch would keep it; empty before its first update."""
        unit, slot = self._holding.locate(parameter)
        state = self._states.get((unit.index, slot.index))
        if state is None or state.is_fresh:
            return {}
        tensors = {
            name: torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=torch.float32)
            for name in self._names(unit, state)
        }
        self._collect(unit, slot, tensors)
        scalars = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.scalars.items()
        }
        return {**scalars, **tensors}

    def _names(self, unit: Unit, state: ParameterState) -> Sequence[str]:
        return [name for name in self._records.names_of(unit) if state.names is None or name in state.names]

    def _collect(self, unit: Unit, slot: Slot, targets: Mapping[str, torch.Tensor]) -> None:
        for chunk, piece in self._pieces(unit, slot):
            lease = self._open(unit, chunk)
            try:
                for name, target in targets.items():
                    lease.workspace.read_state(name, _span(piece), _flat(target)[piece.start : piece.stop])
            finally:
                lease.discard()

    # --------------------------------------------------------------------------------------------------------- modifying

    def load_state(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        """Replace the optimizer's state of a parameter. Per-element tensors have the parameter's shape; the rest is scalar.

        Where states are stored rounded, what `state` gave is stored as it was. Random numbers go on from the state's "step".

        Raises:
            ValueError: they do not fit; nothing has been changed.
        """
        unit, slot = self._holding.locate(parameter)
        state = self._states[unit.index, slot.index]
        names = self._records.names_of(unit)
        if values:
            _check_state(slot, names, state, values)
        num_updates = int(values.get("step", 0))
        tensors = {name: value for name, value in values.items() if name in names and isinstance(value, torch.Tensor)}
        state.scalars = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
            if name not in tensors
        }
        state.is_fresh = not values
        state.num_updates = num_updates
        state.names = tuple(tensors) if values else None
        flats = {name: _in_memory_order(tensor, slot) for name, tensor in tensors.items()}
        for chunk, piece in self._pieces(unit, slot):
            lease = self._open(unit, chunk)
            for name, flat in flats.items():
                lease.workspace.write_state(name, _span(piece), flat[piece.start : piece.stop])
            lease.write_back([])

    def store_modified(self, unit: Unit, changed: Sequence[Slot], before: torch.Tensor | None = None) -> None:
        """The weights of ``changed`` were changed in the open flat buffer: store them, and their main weights.

        A main weight whose model weight was not changed keeps its low bits; another becomes the new weight.

        Args:
            unit: whose.
            changed: which of its parameters.
            before: the trainable segment before the change, where `gather` kept it.
        """
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} is not resident")
        base = unit.flat.tensor()
        unit.version += 1
        indices = {slot.index for slot in changed}
        if self._has_main_in_records:
            for chunk in self._chunks[unit.index]:
                pieces = [piece for piece in chunk.pieces if piece.slot.index in indices]
                if pieces:
                    weights = unit.trainable_view(base)[chunk.start : chunk.stop]
                    self._store_changed(unit, chunk, pieces, weights, before)
        self._write_weights(unit, base)

    def _store_changed(
        self, unit: Unit, chunk: Chunk, pieces: Sequence[Piece], weights: torch.Tensor, before: torch.Tensor | None
    ) -> None:
        lease = self._open(unit, chunk)
        workspace = lease.workspace
        try:
            if not self._has_halves:
                workspace.cast_main()
            elif before is not None:
                workspace.weight.copy_(before[chunk.start : chunk.stop])
            else:
                self._bring_weights(unit, chunk, workspace)
            for piece in pieces:
                span = _span(piece)
                new = weights[span].to(workspace.weight.device)
                integer = {2: torch.int16, 4: torch.int32}[new.element_size()]
                is_kept = workspace.weight[span].view(integer) == new.view(integer)
                main = torch.empty(piece.numel, dtype=torch.float32, device=new.device)
                workspace.read_main(span, main)
                workspace.write_main(span, torch.where(is_kept, main, new.float()))
        except BaseException:
            lease.discard()
            raise
        lease.write_back([])

    def restore(self) -> None:
        """Make the parameters ordinary again, with their weights in memory of their own."""
        units = self._holding.units
        copies = [[self._pager.copy_of(unit, slot) for slot in unit.layout.slots] for unit in units]
        self._holding.release()
        for unit, values in zip(units, copies, strict=True):
            for parameter, value in zip(unit.parameters, values, strict=True):
                parameter.data = value

    def give_back(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Undo a take-over that did not get through: what is held already becomes ordinary again, in its old dtype.

        Args:
            dtypes: ``id`` of each parameter -> its dtype before.
        """
        held = [p for unit in self._holding.units for p in unit.parameters if isinstance(p, PagedParameter)]
        values = [self.main_weight(parameter).to(dtypes[id(parameter)]) for parameter in held]
        let_go(held)
        for parameter, value in zip(held, values, strict=True):
            parameter.data = value

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[Gathered]:
        """Open the parameters' units and keep them open. Returns what `scatter` needs.

        Raises:
            BudgetTooSmallError: they do not fit into memory together.
        """
        units: dict[int, Unit] = {}
        for parameter in parameters:
            unit, _ = self._holding.locate(parameter)
            units[unit.index] = unit
        self._pager.check_room(units.values())
        gathering: list[Gathered] = []
        try:
            for unit in units.values():
                with self._pager.held([unit]):
                    unit.num_active += 1  # held for longer than this block
                    gathering.append(Gathered(unit, self._checksums(unit), self._kept(unit)))
        except BaseException:
            for gathered in gathering:
                self._let_go(gathered.unit)
            raise
        return gathering

    def _kept(self, unit: Unit) -> torch.Tensor | None:
        """A copy of what else nobody would know any more: half of the main weights, if it rests nowhere but here."""
        if not self._has_halves or not unit.stays_resident or unit.flat is None or not unit.layout.trainable_numel:
            return None
        return unit.trainable_view(unit.flat.tensor()).clone()

    def scatter(self, gathering: Sequence[Gathered]) -> None:
        """The counterpart of `gather`."""
        with contextlib.ExitStack() as rest:
            for gathered in gathering:
                rest.callback(self._let_go, gathered.unit)
            for gathered in gathering:
                unit = gathered.unit
                self._take_rebound(unit)
                after = self._checksums(unit)
                changed = [slot for slot in unit.layout.slots if gathered.checksums[slot.index] != after[slot.index]]
                if changed:
                    self.store_modified(unit, changed, gathered.kept)

    def _take_rebound(self, unit: Unit) -> None:
        """Copy what was assigned to ``parameter.data`` into the unit's buffer."""
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} is not resident")
        base = unit.flat.tensor()
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            place = unit.view(base, slot)
            if parameter.data_ptr() != place.data_ptr():
                with torch.no_grad():
                    place.copy_(parameter.data)

    def _let_go(self, unit: Unit) -> None:
        unit.accept_changes()
        unit.num_active = max(unit.num_active - 1, 0)
        if not unit.num_active:
            unit.close()

    def _checksums(self, unit: Unit) -> dict[int, int]:
        if unit.flat is None:
            raise RuntimeError(f"unit {unit.name} is not resident")
        base = unit.flat.tensor().cpu()
        checksums: dict[int, int] = {}
        for slot in unit.layout.slots:
            array: Any = base[slot.offset_bytes : slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize].numpy()
            checksums[slot.index] = zlib.crc32(array)
        return checksums


def _span(piece: Piece) -> slice:
    return slice(piece.offset, piece.offset + piece.numel)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _in_memory_order(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """1-D, the elements in the order in which the slot stores them."""
    if tuple(tensor.stride()) == slot.spec.stride and tuple(tensor.shape) == slot.spec.shape:
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    ordered = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=tensor.dtype, device=tensor.device)
    return _flat(ordered.copy_(tensor.detach().reshape(slot.spec.shape)))


def _check_state(slot: Slot, names: Sequence[str], state: ParameterState, values: Mapping[str, Any]) -> None:
    fqn = slot.spec.fqn
    known = (*(names if state.names is None else state.names), *state.scalars)
    if not state.is_fresh:
        for wrong, what in (
            ([n for n in known if n not in values], "lacks"),
            ([n for n in values if n not in known], "has"),
        ):
            if wrong:
                raise ValueError(
                    f"the state for '{fqn}' {what} {', '.join(map(repr, wrong))}. Give all of {', '.join(map(repr, known))}, "
                    "and nothing else; infinity.GatheredParameters changes weights"
                )
    for name, value in values.items():
        is_tensor = isinstance(value, torch.Tensor)
        if name in names:
            shape = tuple(value.shape) if is_tensor else type(value).__name__
            if shape != tuple(slot.spec.shape) or not value.is_floating_point() or value.device.type == "meta":
                raise ValueError(
                    f"the state '{name}' for '{fqn}' is {shape}, {getattr(value, 'dtype', 'no tensor')}, on "
                    f"{getattr(value, 'device', 'no device')}. Give a floating-point tensor of shape {tuple(slot.spec.shape)}"
                )
        elif is_tensor and value.numel() != 1:
            raise ValueError(
                f"the state for '{fqn}' has '{name}' of shape {tuple(value.shape)}, for which there is no place. Give "
                f"{', '.join(map(repr, names)) or 'none'} per element, and scalars"
            )
