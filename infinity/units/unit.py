"""A unit: the parameters that are fetched and released together.

Knows its parameters, layout and what is in memory of it; must not decide when anything moves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from infinity.numerics.stamp import checksum
from infinity.threads.interrupts import surely
from infinity.torch_internals.foreign_writes import plain_address
from infinity.torch_internals.modes import outside_modes
from infinity.units.layout import ParameterSpec, Slot, UnitLayout
from infinity.units.parameter import PagedView, bind, detach_view, empty, plain_data, set_plain_data, unbind

if TYPE_CHECKING:
    from infinity.device.compute import Fence, FlatBuffer
    from swapper import Extent


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


class PendingUpdate(Protocol):
    """An optimizer update of a unit that is queued or running (see ``infinity.update``)."""

    def wait(self) -> None: ...

    def done(self) -> bool: ...

    def promote(self) -> None: ...

    @property
    def accepts_buffer(self) -> bool:
        """Whether `attach` has a chance: not begun, no buffer yet, and all of the unit's weights are being updated."""
        ...

    def attach(self, flat: FlatBuffer, after: Fence = None) -> bool:
        """Ask the update to leave the whole unit's new weights in ``flat``, which is free after the fence ``after``.

        Returns False if it is too late, or if the update does not have them all.
        """
        ...


class Unit:
    """One unit and its side tables. ``parameters[i]`` lies in ``layout.slots[i]``.

    Where the weights are: ``flat is None``: paged out. ``flat`` and ``arrival``: on their way. ``flat`` alone: resident.
    """

    def __init__(self, index: int, name: str, parameters: Sequence[nn.Parameter], layout: UnitLayout) -> None:
        self.index = index
        self.name = name
        self.parameters = list(parameters)
        self.layout = layout
        self.extent: Extent | None = None
        self.flat: FlatBuffer | None = None
        self.arrival: Arrival | None = None
        self.update: PendingUpdate | None = None
        self.stays_resident = False
        """Whether its weights rest in its flat buffer and nowhere else: it never leaves."""
        self.num_active = 0
        """How many modules that use the unit are inside their forward."""
        self.gathered: list[object] = []
        """What the user holds it open for, see ``checkpoint.state_access.Gathered``: it stays open, also while it is updated."""
        self._tokens: set[weakref.ref[object]] = set()
        self.is_open = False
        self.version = 0
        """Counts the changes of the weights, so that a graph over old ones is noticed."""
        self._counters = [parameter._version for parameter in self.parameters]
        self._twins: dict[int, torch.Tensor] = {}
        self._twin_counters: dict[int, int] = {}
        self._handed_out: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """Views of each twin that somebody may still hold."""
        self.dirty: set[int] = set()
        """Indices of slots whose weights in the flat buffer are newer than where they rest."""
        self.before: dict[int, torch.Tensor] = {}
        """Slot index -> weights before they were written to, where they can be found nowhere else."""
        self._stamps: dict[int, tuple[int, int]] = {}
        """Slot index -> `version` and checksum of the weights, whose memory somebody has got."""
        self.has_been_written = False
        """Whether anybody but the engine has written to a weight, counted in its version."""

    def __repr__(self) -> str:
        return f"Unit({self.index}, {self.name!r}, {len(self.parameters)} parameters, {self.layout.num_bytes} bytes)"

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.layout.num_bytes

    @property
    def num_tokens(self) -> int:
        """How many saved tensors of autograd stand for views of this unit."""
        return len(self._tokens)

    def note_token(self, token: object) -> None:
        """``token`` stands for a view of this unit in autograd's graph as long as it lives."""
        # It dies in the midst of backward. A KeyboardInterrupt that is delivered in a `__del__` is lost, and with it the
        # count: so nothing written in Python runs then.
        self._tokens.add(weakref.ref(token, self._tokens.discard))

    def settle(self) -> bool:
        """Close the unit if no module uses it. Returns whether no backward to come needs its present weights.

        That is so when nothing that autograd has saved stands for them (tokens) or looks at them (plain views).
        """
        if self.num_active:
            return False
        self.close()
        return self.num_tokens == 0 and (self.flat is None or not self.flat.has_views)

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

    def weight(self, slot: Slot) -> torch.Tensor:
        """The parameter of ``slot``: a view of the flat buffer, which must hold the weights."""
        if self.flat is None:
            raise RuntimeError(f"unit {self.name} is paged out")
        return self.view(self.flat.tensor(), slot)

    def trainable_view(self, base: torch.Tensor) -> torch.Tensor:
        """The trainable segment inside ``base``: 1-D, compute dtype, padding included."""
        segment = self.layout.trainable
        if segment is None:
            raise ValueError(f"unit {self.name} is frozen")
        return base[segment.start_bytes : segment.start_bytes + segment.num_bytes].view(segment.dtype)

    @outside_modes
    def open(self) -> None:
        """Bind the parameters to the flat buffer, which must hold their weights."""
        if self.is_open:
            return
        if self.flat is None:
            raise RuntimeError(f"unit {self.name} is paged out and cannot be opened")
        self.note_changes()
        base = self.flat.tensor()
        try:
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                bind(parameter, self.view(base, slot))
            for index, twin in self._twins.items():
                set_plain_data(twin, self.view(base, self.layout.slots[index]))
            self.is_open = True
        except BaseException:  # an interrupt, say: all or none
            self._unbind()
            raise

    @outside_modes
    def twin(self, slot: Slot) -> torch.Tensor:
        """A tensor that is bound to memory as the parameter is, with a version of its own. See `infinity.units.parameter`."""
        twin = self._twins.get(slot.index)
        if twin is None:
            parameter = self.parameters[slot.index]
            # Not a view: it would hold its base, and with that the memory.
            twin = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            set_plain_data(twin, plain_data(parameter))
            self._twin_counters[slot.index] = twin._version
            self._twins[slot.index] = twin
        return twin

    @outside_modes
    def hand_out(self, slot: Slot) -> torch.Tensor:
        """A view of the parameter's twin, for the user: what ``.data`` gives."""
        view = self.twin(slot).detach()
        self.note_view(slot, view)
        return view

    def handed_out(self, slot: Slot) -> list[torch.Tensor]:
        """The views that `hand_out` and `note_view` were called for, as far as anybody holds them."""
        views = [reference() for reference in self._handed_out.get(slot.index, ())]
        return [view for view in views if view is not None]

    def note_view(self, slot: Slot, view: torch.Tensor) -> None:
        """The user has got this view of the parameter."""
        known = self._handed_out.setdefault(slot.index, [])
        known[:] = [reference for reference in known if reference() is not None]
        known.append(weakref.ref(view))

    def note_changes(self) -> None:
        """Take note of what others than the engine have written, as far as torch's counters tell: see `dirty`."""
        with torch._C.DisableTorchFunctionSubclass():
            counters = [parameter._version for parameter in self.parameters]
        if counters != self._counters:
            changed = [i for i, (a, b) in enumerate(zip(counters, self._counters, strict=True)) if a != b]
            self._counters = counters
            self.has_been_written = True
            self.note_written(changed)
            self.take_rebound()
        for index, twin in self._twins.items():
            if twin._version != self._twin_counters[index]:
                self._twin_counters[index] = twin._version
                self.note_written([index])
        for index, (version, before) in list(self._stamps.items()):
            del self._stamps[index]
            if version == self.version and self.flat is not None:  # else the engine itself has changed them
                self.expose(self.layout.slots[index])
                if self._stamps[index][1] != before:
                    self.note_written([index])

    def expose(self, slot: Slot) -> None:
        """Somebody gets the weights' memory, and may write to it: `note_changes` compares what they are with then."""
        if slot.index not in self._stamps:
            self._stamps[slot.index] = self.version, checksum(self.bytes_of(slot))

    def bytes_of(self, slot: Slot) -> torch.Tensor:
        """The parameter's memory in the flat buffer, uint8."""
        if self.flat is None:
            raise RuntimeError(f"unit {self.name} is paged out")
        return self.flat.tensor()[slot.offset_bytes : slot.offset_bytes + slot.numel * slot.spec.dtype.itemsize]

    def let_views_look_at(self, slot: Slot, values: torch.Tensor) -> None:
        """What the user holds of a parameter shows ``values`` (its shape and strides) from now on."""
        for view in self.handed_out(slot):
            if isinstance(view, PagedView) and view.dtype == values.dtype:
                place, start = view.place, slot.offset_bytes // values.dtype.itemsize
                detach_view(view, values.as_strided(place.shape, place.stride, place.offset - start))

    def take_rebound(self) -> None:
        """Copy what ``parameter.set_(...)`` gave to open parameters to where their weights belong."""
        if self.is_open:
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                place = self.weight(slot)
                if plain_address(parameter) != plain_address(place):
                    with torch.no_grad():
                        place.copy_(parameter)

    def note_written(self, indices: Sequence[int]) -> None:
        """The weights of these slots have been written to."""
        self.dirty.update(indices)

    def accept_changes(self) -> None:
        """What was written into the parameters so far has been stored."""
        self.note_changes()
        self.dirty.clear()
        self.before.clear()

    def close(self) -> None:
        """Take the flat buffer away from the parameters; views held by others keep it alive."""
        if not self.is_open:
            return
        self.note_changes()
        surely(self._unbind)
        if self._stamps and (self.flat is None or not self.flat.has_views):
            self._stamps.clear()

    def _unbind(self) -> None:
        for parameter in self.parameters:
            unbind(parameter)
        for twin in self._twins.values():
            empty(twin)
        self.is_open = False


def spec_of(
    fqn: str,
    parameter: nn.Parameter,
    compute_dtype: torch.dtype,
    *,
    keeps_double: bool = False,
    is_trained: bool = True,
) -> ParameterSpec:
    """The layout's view of a parameter. Overlapping or gapped strides become contiguous ones.

    ``keeps_double``: a frozen fp64 parameter stays one. ``is_trained``: False if nothing is ever updated, whatever requires
    a gradient.
    """
    dtype = compute_dtype if parameter.is_floating_point() else parameter.dtype
    is_trainable = parameter.requires_grad and is_trained
    if keeps_double and parameter.dtype == torch.float64 and not is_trainable:
        dtype = torch.float64
    stride = tuple(parameter.stride())
    dense = torch.empty(0, device="meta", dtype=torch.float32).new_empty(parameter.shape)
    if not _is_dense(tuple(parameter.shape), stride):
        stride = tuple(dense.stride())
    return ParameterSpec(fqn, tuple(parameter.shape), stride, dtype, is_trainable)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
