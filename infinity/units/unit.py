"""A unit: the parameters that are fetched and released together.

Knows its parameters, layout and what is in memory of it; must not decide when anything moves.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from infinity.device.drive_tensors import is_dense
from infinity.state_machine import moves
from infinity.torch_internals.names import as_plain, outside_modes, with_lazy_bits
from infinity.units.layout import Chunk, ParameterSpec, Slot, UnitLayout
from infinity.units.parameter import (
    PagedView,
    bind,
    detach_view,
    empty,
    placeholder,
    plain_data,
    set_plain_data,
    unbind,
)

if TYPE_CHECKING:
    from infinity.device.compute import Fence, FlatBuffer
    from swapper import Extent


class UnitState(Enum):
    """Where a unit's weights are, and to whom its flat buffer belongs."""

    PAGED_OUT = auto()
    """Nobody holds memory: the weights are where they rest. Next: they come into a buffer, or are updated where they rest."""
    ARRIVING = auto()
    """The flat buffer belongs to a read. Next: the weights are there, or their update is asked for, or the read has failed."""
    RESIDENT = auto()
    """The unit holds the flat buffer with its weights. Next: parameters look at it, an update begins, or it is given back."""
    BOUND = auto()
    """The unit and its parameters hold the flat buffer, for modules and operations. Next: that ends; if the user has
    gathered the unit, it may be updated meanwhile."""
    UPDATING_PAGED_OUT = auto()
    """The unit holds nothing, the update's pages hold a chunk at a time. What rests may not be read. Next: the update ends,
    or a buffer is found into which it puts the new weights."""
    UPDATING_ARRIVING = auto()
    """The flat buffer belongs to an update that fills it, or to a read after which the update begins. Next: either ends."""
    UPDATING_RESIDENT = auto()
    """The flat buffer belongs to the update: it reads and writes the weights there. Next: it ends."""
    UPDATING_BOUND = auto()
    """As UPDATING_RESIDENT, and parameters still look at the flat buffer. Next: the update ends, or they are cut off."""


_PAIRS = {
    UnitState.PAGED_OUT: UnitState.UPDATING_PAGED_OUT,
    UnitState.ARRIVING: UnitState.UPDATING_ARRIVING,
    UnitState.RESIDENT: UnitState.UPDATING_RESIDENT,
    UnitState.BOUND: UnitState.UPDATING_BOUND,
}
"""Without and with an update that is pending."""

UNIT_MOVES: Mapping[str, Mapping[UnitState, UnitState]] = {
    "adopt": {UnitState.PAGED_OUT: UnitState.RESIDENT},
    "fetch_into": {UnitState.PAGED_OUT: UnitState.ARRIVING, UnitState.UPDATING_PAGED_OUT: UnitState.UPDATING_ARRIVING},
    "expect": {UnitState.ARRIVING: UnitState.ARRIVING},
    "on_arrival": {UnitState.ARRIVING: UnitState.RESIDENT, UnitState.UPDATING_ARRIVING: UnitState.UPDATING_RESIDENT},
    "bind": {UnitState.RESIDENT: UnitState.BOUND, UnitState.BOUND: UnitState.BOUND},
    "unbind": {
        **{state: state for pair in _PAIRS.items() for state in pair},
        UnitState.BOUND: UnitState.RESIDENT,
        UnitState.UPDATING_BOUND: UnitState.UPDATING_RESIDENT,
    },
    "begin_update": _PAIRS,
    "end_update": {after: before for before, after in _PAIRS.items()},
    "release": {
        UnitState.ARRIVING: UnitState.PAGED_OUT,
        UnitState.RESIDENT: UnitState.PAGED_OUT,
        UnitState.UPDATING_ARRIVING: UnitState.UPDATING_PAGED_OUT,
    },
}
"""Method of `Unit` -> state before -> state after. See [Note: debug mode] in ``infinity.state_machine``."""


class Arrival(Protocol):
    """Weights on their way into a flat buffer: a read, or an update that writes its results there."""

    def wait(self) -> None:
        """Return when the compute stream may use the buffer; raise what went wrong."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def promote(self) -> None:
        """Somebody waits for it now."""
        ...


class PendingUpdate(Arrival, Protocol):
    """An optimizer update of a unit that is queued or running (see ``infinity.updates.job``)."""

    @property
    def accepts_buffer(self) -> bool:
        """Whether `attach` has a chance: not begun, no buffer yet, and all of the unit's weights are being updated."""
        ...

    def attach(self, flat: FlatBuffer, after: Fence = None) -> bool:
        """Ask the update to leave the whole unit's new weights in ``flat``, which is free after the fence ``after``.

        Returns False if it is too late, or if the update does not have them all.
        """
        ...


_version_of = operator.attrgetter("_version")


class Unit:
    """One unit and its side tables. ``parameters[i]`` lies in ``layout.slots[i]``.

    What is in memory of it is its `state`: others read the fields that make it up, and change them by its methods only.
    """

    def __init__(self, index: int, name: str, parameters: Sequence[nn.Parameter], layout: UnitLayout) -> None:
        # Index, name, parameters and layout stay for good. All else is touched under the engine lock, unless another
        # one is named.
        self.index = index
        self.name = name
        self.parameters = list(parameters)
        self.layout = layout
        self.extent: Extent | None = None
        """Where the weights rest on NVMe, from `WeightStore.allocate` on; None if they rest elsewhere."""
        self.is_persistent = False
        """Whether its weights rest in its flat buffer and nowhere else: it never leaves. Set once, before `adopt`."""
        self.flat: FlatBuffer | None = None
        """The memory of the weights: from `adopt` or `fetch_into` until `release`."""
        self.arrival: Arrival | None = None
        """What brings the weights into `flat`, which does not hold them yet: from `fetch_into` until `on_arrival`."""
        self.update: PendingUpdate | None = None
        """What changes the weights: from `begin_update` until somebody has waited for it and calls `end_update`."""
        self.is_bound = False
        """Whether the parameters look at `flat`: from `bind` until `unbind`."""
        self.num_active = 0
        """How many modules and operations use the unit: each from `begin_use` until `end_use`."""
        self.gathered: list[object] = []
        """What the user holds it open for (`checkpoint.stored_weights.Gathered`): each from `hold_gathered` until
        `release_gathered`. The unit stays bound, and no step is made meanwhile."""
        self.version = 0
        """Counts the changes of the weights, so that a graph over old ones is noticed."""
        self.dirty: set[int] = set()
        """Indices of slots whose weights in `flat` are newer than where they rest: from `detect_writes` until they are
        stored."""
        self.before: dict[int, torch.Tensor] = {}
        """Slot index -> weights before they were written to, where nothing else knows them: from `save_before` until what was
        written is stored."""
        self.stored_checksums: dict[int, tuple[int, int]] = {}
        """Index of a frozen slot -> crc32c before and after its stored weights, where a checkpoint asked for it: until other
        weights are stored. A base of 70B would be read whole at each save without it."""
        self.has_been_written = False
        """Whether anybody but the engine has ever written to a weight, counted in its version."""
        self.saved_references: set[weakref.ref[object]] = set()
        """What stands for views of the unit in autograd's graph: added by `PackedSavedTensor`, discarded when it dies, which
        may be on any thread and in the midst of backward, so that nothing written in Python runs then."""
        self._counters = [parameter._version for parameter in self.parameters]
        """torch's count of writes to each parameter, as of the last `detect_writes`."""
        self._forms = [
            (slot.spec.dtype, (slot.spec.shape, slot.spec.stride, slot.offset_bytes // slot.spec.dtype.itemsize))
            for slot in layout.slots
        ]
        """Of each parameter, the dtype of its segment, and shape, strides and first element in the flat buffer as that dtype."""
        self._placeholders: list[torch.Tensor] = []
        """What the parameters hold while they are unbound: from the first time on, for good."""
        self._data_aliases: dict[int, torch.Tensor] = {}
        """Slot index -> see `data_alias`; from its first use on, for good."""
        self._alias_counters: dict[int, int] = {}
        """As `_counters`, of the `.data` aliases."""
        self._data_views: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """Slot index -> views of the `.data` alias that somebody may still hold."""

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name!r}, {len(self.parameters)} parameters, {self.layout.num_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.layout.num_bytes

    @property
    def num_saved_tensors(self) -> int:
        """How many saved tensors of autograd stand for views of this unit."""
        return len(self.saved_references)

    def saved_tensors(self) -> list[object]:
        """What stands for them."""
        found = [reference() for reference in tuple(self.saved_references)]
        return [saved for saved in found if saved is not None]

    # ------------------------------------------------------------------------------------------------- what is in memory

    @property
    def state(self) -> UnitState:
        """Who holds memory, as the fields tell."""
        # There is no other record of it, which could contradict them.
        if self.flat is None:
            return UnitState.PAGED_OUT if self.update is None else UnitState.UPDATING_PAGED_OUT
        if self.arrival is not None:
            return UnitState.ARRIVING if self.update is None else UnitState.UPDATING_ARRIVING
        if self.is_bound:
            return UnitState.BOUND if self.update is None else UnitState.UPDATING_BOUND
        return UnitState.RESIDENT if self.update is None else UnitState.UPDATING_RESIDENT

    @moves(UNIT_MOVES)
    def adopt(self, flat: FlatBuffer) -> None:
        """``flat`` is the unit's memory from now on; the caller has put its weights there, or does so next."""
        self.flat = flat

    @moves(UNIT_MOVES)
    def fetch_into(self, flat: FlatBuffer, arrival: Arrival) -> None:
        """``flat`` is the unit's memory from now on; its weights come with ``arrival``, which may be the pending update."""
        self.arrival, self.flat = arrival, flat  # at once: a buffer without arrival looks as if it held the weights

    @moves(UNIT_MOVES)
    def expect(self, arrival: Arrival) -> None:
        """The weights come with this ``arrival``, not with what `fetch_into` was given."""
        self.arrival = arrival

    @moves(UNIT_MOVES)
    def on_arrival(self) -> None:
        """The weights have arrived: somebody has waited for that."""
        self.arrival = None

    @moves(UNIT_MOVES)
    def release(self) -> FlatBuffer:
        """Give up the memory, with whatever was to come into it. It is the caller's from now on."""
        if self.flat is None:
            raise RuntimeError(f"unit {self.name} is paged out and has no memory to release")
        flat, self.flat, self.arrival = self.flat, None, None
        return flat

    @moves(UNIT_MOVES)
    def begin_update(self, update: PendingUpdate) -> None:
        """The weights belong to ``update`` until `end_update`; those that a graph was made with are outdated."""
        self.update = update
        self.version += 1

    @moves(UNIT_MOVES)
    def end_update(self) -> None:
        """The update is done, or never began."""
        self.update = None

    def count_update(self, indices: Iterable[int]) -> None:
        """These slots' parameters are updated: torch's count of writes moves, by which a module may know what it has kept."""
        with as_plain():
            for index in indices:
                parameter = self.parameters[index]
                before = parameter._version
                torch.autograd.graph.increment_version(parameter)
                self._counters[index] += parameter._version - before

    def begin_use(self) -> None:
        """A module or operation needs the unit in memory until `end_use`."""
        self.num_active += 1

    def end_use(self) -> None:
        """The counterpart of `begin_use`."""
        self.num_active = max(self.num_active - 1, 0)

    def forget_uses(self, *, keeps_gathered: bool = False) -> None:
        """Those inside the unit were cut off, and will not come back to end their use; gathered weights may stay in use."""
        self.num_active = len(self.gathered) if keeps_gathered else 0

    def hold_gathered(self, gathered: object) -> None:
        """The user wants the unit to stay bound until `release_gathered`."""
        self.num_active += 1
        self.gathered.append(gathered)

    def release_gathered(self, gathered: object) -> None:
        """The counterpart of `hold_gathered`, also if that was cut off. Unbinds the unit if nobody else uses it."""
        others = [other for other in self.gathered if other is not gathered]
        if len(others) < len(self.gathered):
            self.gathered = others
            self.end_use()
        if not self.num_active:
            self.unbind()

    def unbind_unused(self) -> bool:
        """Unbind the unit if no module uses it. Returns whether no backward to come needs its present weights.

        That is so when nothing that autograd has saved stands for them (packed saved tensors) or looks at them (plain views).
        """
        if self.num_active:
            return False
        self.unbind()
        return self.num_saved_tensors == 0 and (self.flat is None or not self.flat.has_views)

    # ----------------------------------------------------------------------------------------------- views of its memory

    def view(self, base: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The parameter of ``slot`` inside ``base``, the uint8 tensor of a flat buffer, with its shape and strides."""
        spec = slot.spec
        return base.view(spec.dtype).as_strided(spec.shape, spec.stride, slot.offset_bytes // spec.dtype.itemsize)

    def slot_at(self, offset_bytes: int) -> Slot | None:
        """The parameter in which this byte of the flat buffer lies."""
        for slot in self.layout.slots:
            if slot.offset_bytes <= offset_bytes < slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize:
                return slot
        return None

    @property
    def memory(self) -> torch.Tensor:
        """The whole flat buffer, uint8."""
        if self.flat is None:
            raise RuntimeError(f"unit {self.name} is paged out")
        return self.flat.tensor()

    def weight(self, slot: Slot) -> torch.Tensor:
        """The parameter of ``slot``: a view of the flat buffer, which must hold the weights."""
        return self.view(self.memory, slot)

    def weights_of(self, chunk: Chunk) -> torch.Tensor:
        """A chunk's model weights: a view of the flat buffer, which must hold the weights."""
        return self.trainable_view(self.memory)[chunk.start : chunk.stop]

    def trainable_view(self, base: torch.Tensor) -> torch.Tensor:
        """The trainable segment inside ``base``: 1-D, compute dtype, padding included."""
        segment = self.layout.trainable
        if segment is None:
            raise ValueError(f"unit {self.name} is frozen")
        return base[segment.start_bytes : segment.start_bytes + segment.num_bytes].view(segment.dtype)

    @moves(UNIT_MOVES)
    @outside_modes
    def bind(self) -> None:
        """Let the parameters look at the flat buffer, which must hold their weights."""
        if self.is_bound:
            return
        self.detect_writes()
        base = self.memory
        of_dtype = {segment.dtype: base.view(segment.dtype) for segment in self.layout.segments}
        try:
            bind(self.parameters, [of_dtype[dtype].as_strided(*form) for dtype, form in self._forms])
            for index, data_alias in self._data_aliases.items():
                set_plain_data(data_alias, self.view(base, self.layout.slots[index]))
            self.is_bound = True
        except BaseException:  # all or none
            self._unbind()
            raise

    @outside_modes
    def data_alias(self, slot: Slot) -> torch.Tensor:
        """A tensor that is bound to memory as the parameter is, with a version of its own. See `infinity.units.parameter`."""
        data_alias = self._data_aliases.get(slot.index)
        if data_alias is None:
            parameter = self.parameters[slot.index]
            # Not a view: it would hold its base, and with that the memory.
            data_alias = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            set_plain_data(data_alias, plain_data(parameter))
            self._alias_counters[slot.index] = data_alias._version
            self._data_aliases[slot.index] = data_alias
        return data_alias

    @outside_modes
    def data_view(self, slot: Slot) -> torch.Tensor:
        """A view of the parameter's `.data` alias, for the user: what ``.data`` gives."""
        view = self.data_alias(slot).detach()
        self.on_view(slot, view)
        return view

    def data_views(self, slot: Slot) -> list[torch.Tensor]:
        """The views that `data_view` and `on_view` were called for, as far as anybody holds them."""
        views = [reference() for reference in self._data_views.get(slot.index, ())]
        return [view for view in views if view is not None]

    def on_view(self, slot: Slot, view: torch.Tensor) -> None:
        """The user has got this view of the parameter."""
        known = self._data_views.setdefault(slot.index, [])
        known[:] = [reference for reference in known if reference() is not None]
        known.append(weakref.ref(view))

    def detect_writes(self) -> None:
        """Take note of what others than the engine have written, as far as torch's counters tell: see `dirty`."""
        with as_plain():
            counters = [*map(_version_of, self.parameters)]
        if counters != self._counters:
            changed = [i for i, (a, b) in enumerate(zip(counters, self._counters, strict=True)) if a != b]
            self._counters = counters
            self.has_been_written = True
            self.on_write(changed)
        for index, data_alias in self._data_aliases.items():
            if data_alias._version != self._alias_counters[index]:
                self._alias_counters[index] = data_alias._version
                self.on_write([index])

    def bytes_of(self, slot: Slot) -> torch.Tensor:
        """The parameter's memory in the flat buffer, uint8."""
        return self.memory[slot.offset_bytes : slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize]

    def redirect_views(self, slot: Slot, values: torch.Tensor) -> None:
        """What the user holds of a parameter shows ``values`` (its shape and strides) from now on."""
        for view in self.data_views(slot):
            if isinstance(view, PagedView) and view.dtype == values.dtype:
                place, start = view.place, slot.offset_bytes // values.dtype.itemsize
                shown = values.as_strided(place.shape, place.stride, place.offset - start)
                detach_view(view, with_lazy_bits(shown, place.bits))

    def on_write(self, indices: Iterable[int]) -> None:
        """The weights of these slots have been written to."""
        self.dirty.update(indices)

    def save_before(self, slot: Slot) -> None:
        """The parameter may be written to from now on: see `before`."""
        self.before[slot.index] = self.weight(slot).clone()

    def undo_writes(self) -> None:
        """Undo what was written, as far as it is known what was there `before`."""
        for index, values in self.before.items():
            self.weight(self.layout.slots[index]).copy_(values)

    def forget_written(self, indices: Iterable[int]) -> None:
        """What was written to these slots will not be stored."""
        self.dirty.difference_update(indices)

    def forget_changes(self) -> None:
        """What has been noted of writes is stored, or undone."""
        self.dirty.clear()
        self.before.clear()

    def outdate(self) -> None:
        """The weights are others from now on: a graph over the present ones is not to be used any more."""
        self.version += 1

    @moves(UNIT_MOVES)
    def unbind(self) -> None:
        """Take the flat buffer away from the parameters; views held by others keep it alive."""
        if not self.is_bound:
            return
        self.detect_writes()
        self._unbind()

    def _unbind(self) -> None:
        if not self._placeholders:
            self._placeholders = [placeholder(p.dtype, p.device, p.shape) for p in self.parameters]
        unbind(self.parameters, self._placeholders)
        for data_alias in self._data_aliases.values():
            empty(data_alias)
        self.is_bound = False


def spec_of(
    fqn: str,
    parameter: nn.Parameter,
    compute_dtype: torch.dtype,
    *,
    keeps_double: bool = False,
    is_trainable: bool | None = None,
    packed: str | None = None,
) -> ParameterSpec:
    """The layout's view of a parameter. Of strides with gaps or overlaps, only the order of dimensions stays.

    A float8 parameter, which is frozen, keeps its dtype. ``keeps_double``: so does a frozen fp64 one. ``is_trainable``: whether
    it gets room for states; None: if it requires a gradient. ``packed``: the format in which it is stored if it does not.
    """
    dtype = compute_dtype if parameter.is_floating_point() and not is_float8(parameter.dtype) else parameter.dtype
    if is_trainable is None:
        is_trainable = parameter.requires_grad
    if keeps_double and parameter.dtype == torch.float64 and not is_trainable:
        dtype = torch.float64
    stride = dense_strides(tuple(parameter.shape), tuple(parameter.stride()))
    return ParameterSpec(fqn, tuple(parameter.shape), stride, dtype, is_trainable, None if is_trainable else packed)


def is_float8(dtype: torch.dtype) -> bool:
    """Whether it is one of torch's float8 dtypes, whose values have a scale elsewhere: a cast alone would lose it."""
    return dtype.is_floating_point and dtype.itemsize == 1


def dense_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """``stride`` if elements fill their memory with it, else what ``clone()`` gives: dimensions in the same order."""
    form = torch.empty_strided(shape, stride, device="meta", dtype=torch.float32)
    return stride if 0 in shape or is_dense(form) else tuple(torch.empty_like(form).stride())
