"""A unit: the parameters that are fetched and released together. It records what is in memory, and decides nothing."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from infinity.device.drive_tensors import is_dense
from infinity.state_machine import moves
from infinity.torch_internals.names import outside_modes, with_lazy_bits, without_torch_function
from infinity.units.layout import Chunk, ParameterSpec, Slot, UnitLayout
from infinity.units.parameter import PagedView, alias, bind, detach_view, empty, placeholder, set_plain_data, unbind
from swapper import Latch

if TYPE_CHECKING:
    from infinity.device.compute import Fence, FlatBuffer
    from swapper import Extent


class UnitState(Enum):
    """Where a unit's weights are, and who may use its flat buffer."""

    PAGED_OUT = auto()
    """No flat buffer. Next: a fetch begins, or an update of the stored weights."""
    ARRIVING = auto()
    """A read fills the flat buffer. Next: it ends or fails, or an update is requested."""
    RESIDENT = auto()
    """The flat buffer holds the weights, and nobody uses them. Next: bound, updated or released."""
    BOUND = auto()
    """The parameters are views of the flat buffer. Next: unbound; a unit that the user has gathered may also be
    updated."""
    UPDATING_PAGED_OUT = auto()
    """An update works chunk by chunk in staging buffers. Stored weights may not be read. Next: it ends, or gets a
    buffer for the new weights."""
    UPDATING_ARRIVING = auto()
    """An update fills the flat buffer, or waits for a read that does. Next: the weights are complete."""
    UPDATING_RESIDENT = auto()
    """An update reads and writes the weights in the flat buffer. Next: it ends."""
    UPDATING_BOUND = auto()
    """As UPDATING_RESIDENT, while parameters are still views of the flat buffer. Next: the update ends, or unbound."""


_PAIRS = {
    UnitState.PAGED_OUT: UnitState.UPDATING_PAGED_OUT,
    UnitState.ARRIVING: UnitState.UPDATING_ARRIVING,
    UnitState.RESIDENT: UnitState.UPDATING_RESIDENT,
    UnitState.BOUND: UnitState.UPDATING_BOUND,
}
"""State without an update -> state with a pending one."""

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
        """Return when the compute stream may use the buffer; raises the error of the read or update."""
        ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def promote(self) -> None:
        """Raise its priority to that of a demand read."""
        ...


@dataclass(eq=False)
class SimpleArrival:
    """An `Arrival` without a request under way that could be promoted."""

    wait: Callable[[], None]
    is_done: bool = True

    def done(self) -> bool:
        return self.is_done

    def promote(self) -> None: ...


class LatchedArrival:
    """An `Arrival` that another thread ends."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._is_over = Latch()

    def wait(self) -> None:
        self._is_over.wait()
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self._is_over.is_set()

    def finish(self, error: BaseException | None) -> None:
        """Let all waits return, or raise ``error``."""
        self.error = error
        self._is_over.set()


class PendingUpdate(Arrival, Protocol):
    """An optimizer update of a unit that is queued or running (see ``infinity.updates.job``)."""

    @property
    def accepts_buffer(self) -> bool:
        """Whether `attach` may succeed: not begun, no buffer yet, and all weights of the unit are updated."""
        ...

    def attach(self, flat: FlatBuffer, after: Fence = None) -> bool:
        """Have the update write the unit's new weights to ``flat``, which is free after the fence ``after``.

        Returns False if the update has begun, or does not have all weights of the unit.
        """
        ...


_version_of = operator.attrgetter("_version")


class Unit:
    """One unit and its side tables. ``parameters[i]`` lies in ``layout.slots[i]``.

    Others read the fields that make up its `state`, and change them by its methods only.
    """

    def __init__(self, index: int, name: str, parameters: Sequence[nn.Parameter], layout: UnitLayout) -> None:
        # Index, name, parameters and layout stay for good. All else is touched under the engine lock, unless another
        # one is named.
        self.index = index
        self.name = name
        self.parameters = list(parameters)
        self.layout = layout
        self.num_bytes = layout.num_bytes
        """Bytes of the flat buffer."""
        self.extent: Extent | None = None
        """The weights' bytes on NVMe, from `WeightStore.allocate` on; None if they are stored elsewhere."""
        self.is_persistent = False
        """Whether the flat buffer is the only place of its weights, so that it is never evicted. Set once, before
        `adopt`."""
        self.flat: FlatBuffer | None = None
        """The memory of the weights: from `adopt` or `fetch_into` until `release`."""
        self.arrival: Arrival | None = None
        """The transfer that fills `flat`, which has no weights yet: from `fetch_into` until `on_arrival`."""
        self.update: PendingUpdate | None = None
        """The update of the weights: from `begin_update` until somebody has waited for it and calls `end_update`."""
        self.is_bound = False
        """Whether the parameters are views of `flat`: from `bind` until `unbind`."""
        self.num_active = 0
        """Modules and operations that use the unit: each from `begin_use` until `end_use`. It is not evicted
        meanwhile."""
        self.gathered: list[object] = []
        """User blocks that hold it open (`checkpoint.stored_weights.Gathered`): each from `hold_gathered` until
        `release_gathered`. The unit stays bound, and no step is made meanwhile."""
        self.version = 0
        """Counts changes of the weights. A backward over a graph of an older version raises an error."""
        self.dirty: set[int] = set()
        """Indices of slots that a user has written to in `flat`: from `detect_writes` until they are stored."""
        self.before: dict[int, torch.Tensor] = {}
        """Slot index -> its weights before a user's write, where no other copy exists: from `save_before` until the
        write is stored."""
        self.stored_checksums: dict[int, tuple[int, int]] = {}
        """Index of a frozen slot -> crc32c before and after its stored weights, as a checkpoint has computed it: until
        other weights are stored. Without it, each save would read a frozen base of 70B parameters."""
        self.has_been_written = False
        """Whether a user has ever written to a weight, as counted by torch's versions."""
        self.saved_references: set[weakref.ref[object]] = set()
        """Weak references to the `PackedSavedTensor` objects in autograd's graph that stand for views of this unit."""
        # Their callback is `set.discard` itself, a function in C: an object may die on any thread, in the midst of
        # backward, where a callback in Python could run while another thread iterates.
        self._counters = [parameter._version for parameter in self.parameters]
        """torch's count of writes to each parameter, as of the last `detect_writes`."""
        self._forms = [
            (slot.spec.dtype, (slot.spec.shape, slot.spec.stride, slot.offset_bytes // slot.spec.dtype.itemsize))
            for slot in layout.slots
        ]
        """Per parameter its dtype, and the arguments of `as_strided` on the flat buffer viewed as that dtype."""
        self._placeholders: list[torch.Tensor] = []
        """The data of unbound parameters; made once."""
        self._data_aliases: dict[int, torch.Tensor] = {}
        """Slot index -> see `data_alias`; made at first use, never dropped."""
        self._alias_counters: dict[int, int] = {}
        """As `_counters`, for the `.data` aliases."""
        self._data_views: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """Slot index -> views of the `.data` alias that were given to users."""

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name!r}, {len(self.parameters)} parameters, {self.layout.num_bytes} bytes)"

    @property
    def num_saved_tensors(self) -> int:
        """Tensors that autograd has saved and that are views of this unit."""
        return len(self.saved_references)

    def saved_tensors(self) -> list[object]:
        """Those saved tensors, as far as they are alive."""
        # The tuple is a copy made in C: objects die, and are discarded, while the loop runs.
        found = [reference() for reference in tuple(self.saved_references)]
        return [saved for saved in found if saved is not None]

    # ------------------------------------------------------------------------------------------------- what is in memory

    @property
    def state(self) -> UnitState:
        """The state, computed from the fields, so that no second record can contradict them."""
        if self.flat is None:
            return UnitState.PAGED_OUT if self.update is None else UnitState.UPDATING_PAGED_OUT
        if self.arrival is not None:
            return UnitState.ARRIVING if self.update is None else UnitState.UPDATING_ARRIVING
        if self.is_bound:
            return UnitState.BOUND if self.update is None else UnitState.UPDATING_BOUND
        return UnitState.RESIDENT if self.update is None else UnitState.UPDATING_RESIDENT

    @moves(UNIT_MOVES)
    def adopt(self, flat: FlatBuffer) -> None:
        """Take ``flat`` as the unit's memory. The caller has written its weights there, or does so next."""
        self.flat = flat

    @moves(UNIT_MOVES)
    def fetch_into(self, flat: FlatBuffer, arrival: Arrival) -> None:
        """Take ``flat`` as the unit's memory, which ``arrival`` fills. That may be the pending update."""
        # Arrival first: a signal handler between the two stores would take a buffer without arrival for one with
        # weights.
        self.arrival, self.flat = arrival, flat

    @moves(UNIT_MOVES)
    def expect(self, arrival: Arrival) -> None:
        """Replace the arrival that `fetch_into` was given."""
        self.arrival = arrival

    @moves(UNIT_MOVES)
    def on_arrival(self) -> None:
        """Record that the weights have arrived. The caller has waited for them."""
        self.arrival = None

    @moves(UNIT_MOVES)
    def release(self) -> FlatBuffer:
        """Return the flat buffer to the caller. A read that is still under way is no concern of the unit any more."""
        if self.flat is None:
            raise RuntimeError(f"unit {self.name} is paged out and has no memory to release")
        flat, self.flat, self.arrival = self.flat, None, None
        return flat

    @moves(UNIT_MOVES)
    def begin_update(self, update: PendingUpdate) -> None:
        """Let ``update`` change the weights until `end_update`. Graphs over the present weights become invalid."""
        self.update = update
        self.version += 1

    @moves(UNIT_MOVES)
    def end_update(self) -> None:
        """Forget the update, which is done or never began."""
        self.update = None

    def count_update(self, indices: Iterable[int]) -> None:
        """Increment the versions of these slots' parameters, as an optimizer's in-place update does in torch."""
        # Modules use a weight's version to invalidate what they have computed from it. `_counters` moves with it, so
        # that `detect_writes` does not take an update for a write of the user's.
        with without_torch_function():
            places = list(indices)
            parameters = [self.parameters[index] for index in places]
            before = [*map(_version_of, parameters)]
            torch.autograd.graph.increment_version(parameters)
            for index, version, now in zip(places, before, map(_version_of, parameters), strict=True):
                self._counters[index] += now - version

    def begin_use(self) -> None:
        """Keep the unit in memory until `end_use`."""
        self.num_active += 1

    def end_use(self) -> None:
        """End one use."""
        self.num_active = max(self.num_active - 1, 0)  # may be late: `forget_uses` has reset the count

    def forget_uses(self, *, keeps_gathered: bool = False) -> None:
        """End all uses, after an exception has cut off a forward or backward; gathered weights may stay in use."""
        self.num_active = len(self.gathered) if keeps_gathered else 0

    def hold_gathered(self, gathered: object) -> None:
        """Keep the unit bound for the user until `release_gathered`."""
        self.num_active += 1
        self.gathered.append(gathered)

    def release_gathered(self, gathered: object) -> None:
        """End a `hold_gathered`, also one that was cut off. Unbinds the unit if nobody else uses it."""
        # Not in the list if it was ended before, or if an interrupt came before the append.
        others = [other for other in self.gathered if other is not gathered]
        if len(others) < len(self.gathered):
            self.gathered = others
            self.end_use()
        if not self.num_active:
            self.unbind()

    def unbind_unused(self) -> bool:
        """Unbind the unit if no module uses it. Returns whether no later backward needs its present weights."""
        # A backward may need them if autograd has saved a packed tensor, or if a plain view of the memory is alive.
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
        """The slot that contains this byte of the flat buffer; None for padding."""
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
        """Make the parameters views of the flat buffer, which must hold their weights."""
        if self.is_bound:
            return
        # A view that a user kept shares the parameter's version, and may have been written to while the unit was
        # unbound.
        self.detect_writes()
        base = self.memory
        # One view per dtype and one as_strided per parameter, and not two calls per parameter: this runs for every unit
        # and pass.
        of_dtype = {segment.dtype: base.view(segment.dtype) for segment in self.layout.segments}
        try:
            bind(self.parameters, [of_dtype[dtype].as_strided(*form) for dtype, form in self._forms])
            for index, data_alias in self._data_aliases.items():
                set_plain_data(data_alias, self.view(base, self.layout.slots[index]))
            self.is_bound = True
        except BaseException:  # an interrupt in the loop leaves some bound: `is_bound` speaks for all of them
            self._unbind()
            raise

    @outside_modes
    def data_alias(self, slot: Slot) -> torch.Tensor:
        """The tensor behind ``.data``, bound and unbound with the parameter. See [Note: seen by version] in
        `parameter`."""
        data_alias = self._data_aliases.get(slot.index)
        if data_alias is None:
            data_alias = alias(self.parameters[slot.index])
            self._alias_counters[slot.index] = data_alias._version
            self._data_aliases[slot.index] = data_alias
        return data_alias

    @outside_modes
    def data_view(self, slot: Slot) -> torch.Tensor:
        """A new view of the `.data` alias: the value of ``parameter.data``."""
        view = self.data_alias(slot).detach()
        self.on_view(slot, view)
        return view

    def data_views(self, slot: Slot) -> list[torch.Tensor]:
        """The views from `data_view` and `on_view` that are alive."""
        views = [reference() for reference in self._data_views.get(slot.index, ())]
        return [view for view in views if view is not None]

    def on_view(self, slot: Slot, view: torch.Tensor) -> None:
        """Remember a view that a user gets. It is detached if the parameter gets other values."""
        known = self._data_views.setdefault(slot.index, [])
        known[:] = [reference for reference in known if reference() is not None]
        known.append(weakref.ref(view))

    def detect_writes(self) -> None:
        """Add slots to `dirty` whose versions have changed since the last call. The engine's own writes do not
        count."""
        with without_torch_function():
            counters = [*map(_version_of, self.parameters)]  # map and attrgetter: one loop in C
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
        """Make the user's views of a parameter views of ``values`` (the parameter's shape and strides)."""
        # Worked example: a parameter of 6 elements starts at byte 128 of the flat buffer, dtype bf16. A view of its
        # elements 2..4 has place.offset = 64 + 2 = 66 elements from the buffer's beginning; in `values` it begins at 66
        # - 64 = 2.
        for view in self.data_views(slot):
            if isinstance(view, PagedView) and view.dtype == values.dtype:
                place, start = view.place, slot.offset_bytes // values.dtype.itemsize
                shown = values.as_strided(place.shape, place.stride, place.offset - start)
                detach_view(view, with_lazy_bits(shown, place.lazy_bits))

    def on_write(self, indices: Iterable[int]) -> None:
        """Mark these slots as written to."""
        self.dirty.update(indices)

    def save_before(self, slot: Slot) -> None:
        """Copy a slot's weights before a write: see `before`."""
        self.before[slot.index] = self.weight(slot).clone()

    def undo_writes(self) -> None:
        """Restore the weights of the slots in `before`."""
        for index, values in self.before.items():
            self.weight(self.layout.slots[index]).copy_(values)

    def forget_written(self, indices: Iterable[int]) -> None:
        """Drop these slots from `dirty`: the writes are not stored."""
        self.dirty.difference_update(indices)

    def forget_changes(self) -> None:
        """Forget all writes, which have been stored or undone."""
        self.dirty.clear()
        self.before.clear()

    def outdate(self) -> None:
        """Invalidate graphs over the present weights, which have been replaced."""
        self.version += 1

    @moves(UNIT_MOVES)
    def unbind(self) -> None:
        """Replace the parameters' data by placeholders. Views that others hold keep the flat buffer alive."""
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
    """The `ParameterSpec` of a parameter; gaps and overlaps of its strides are removed.

    Args:
        fqn, parameter, compute_dtype: see `ParameterSpec`. Float8 and integer parameters keep their dtype.
        keeps_double: whether a frozen fp64 parameter keeps its dtype.
        is_trainable: whether it gets room for states; None: if it requires a gradient.
        packed: the format in which a parameter without states is stored.
    """
    dtype = cast_dtype(parameter.dtype, compute_dtype)
    if is_trainable is None:
        is_trainable = parameter.requires_grad
    if keeps_double and parameter.dtype == torch.float64 and not is_trainable:
        dtype = torch.float64
    stride = dense_strides(tuple(parameter.shape), tuple(parameter.stride()))
    return ParameterSpec(fqn, tuple(parameter.shape), stride, dtype, is_trainable, None if is_trainable else packed)


def cast_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What a cast of floating-point tensors to ``wanted`` makes of ``dtype``. None: there is no cast."""
    # A float8 tensor has its scales in another one: a cast alone would give wrong values.
    return dtype if wanted is None or not dtype.is_floating_point or is_float8(dtype) else wanted


def is_float8(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is one of torch's float8 dtypes. Their values have a scale elsewhere, which a cast would
    lose."""
    return dtype.is_floating_point and dtype.itemsize == 1


def dense_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """``stride`` if it has no gaps or overlaps, else the strides of a ``clone()``, with dimensions in the same
    order."""
    # Meta tensors let torch compute strides without memory. A transposed weight keeps its strides: (3, 4) with (1, 3).
    form = torch.empty_strided(shape, stride, device="meta", dtype=torch.float32)
    return stride if 0 in shape or is_dense(form) else tuple(torch.empty_like(form).stride())
