"""Autograd's hooks for saved tensors, put up around a forward and taken down after it.

[Note: interrupted hooks] torch runs no forward hook after a KeyboardInterrupt, so one that comes in a forward leaves our hooks
on torch's stack. Nothing else notes that they are there: they are found on that stack, and taken down when the next forward
begins, or the one that was cut off is abandoned: ``engine(...)`` does so at once. A context of the user's, or a checkpoint, that
is left before that, around a call of the module itself, takes ours down in place of its own, which stay up then, as no others
would: `abandon` takes these down. Of several such contexts, one in the other, only the innermost.

[Note: hooks of the user] torch calls the innermost hooks only, so ours call those of the user that they cover: these get
what is saved, weights as well, and what they give is saved in its place (compressed, counted, moved). Covered are hooks that
were put up around the model. What is computed
under hooks that a forward has put up inside it is theirs alone: a view of a weight that they keep holds the unit in memory.
Where what they give is or holds a view of a weight, a packed saved tensor takes the view's place until it is unpacked. Of
``torch.autograd.graph.save_on_cpu``, which changes no bits, weights are kept away: it would copy them all. A checkpoint around a
call of the model, or of a part of it, counts what its function saves, and finds it in the recomputation by its number: its
hooks get everything, in both. In the graph are packed weights all the same, so that no unit has to stay in memory.

[Note: several engines] What is computed of two engines' weights is saved by the hooks of one of them, those that are the
innermost. So each gives the other's weights to the other to pack, and to unpack.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from infinity.torch_internals.names import saving_hooks, with_lazy_bits
from infinity.units.layout import Slot
from infinity.units.parameter import ResidentParameter, ViewPlace
from infinity.units.unit import Unit


class PackedSavedTensor:
    """Stands for a view of a unit's weights in autograd's graph."""

    __slots__ = (
        "__weakref__",
        "dtype",
        "is_parameter",
        "kept",
        "lazy_bits",
        "offset",
        "shape",
        "stride",
        "tensor_version",
        "unit",
        "version",
    )

    def __init__(
        self, unit: Unit, tensor: torch.Tensor, slot: Slot | None = None, place: ViewPlace | None = None
    ) -> None:
        """``tensor``: the view; or a whole paged-out parameter, with its ``slot``; or a `PagedView`, with its ``place``."""
        self.unit = unit
        self.version = unit.version
        # Of nearly all the class says it: `isinstance` with nn.Parameter runs Python.
        self.is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)
        """Whether it is a parameter itself and not a view, so that it shows what is assigned to its ``data``."""
        base = tensor if self.is_parameter else tensor._base
        is_of_parameter = type(base) is ResidentParameter or isinstance(base, nn.Parameter)
        # Without elements nothing can be written, and the place is that of the next parameter.
        self.tensor_version: int | None = tensor._version if is_of_parameter and tensor.numel() else None
        """torch's version counter of the parameter, as it was in forward; None if torch would not check it."""
        self.kept: tuple[torch.Tensor, int] | None = None
        """Bytes that it still views after the parameter got others, and their offset in the flat buffer."""
        self.lazy_bits = tensor.is_conj(), tensor.is_neg()
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride() if slot is None else slot.spec.stride
        self.offset = tensor.storage_offset() if slot is None else slot.offset_bytes // tensor.dtype.itemsize
        if tensor.requires_grad and not is_of_parameter:
            # Unpacked in a backward with create_graph=True: it has a counter of its own.
            owner = unit.slot_at(int(self.offset) * self.dtype.itemsize)
            self.tensor_version = tensor._version if owner is None else unit.parameters[owner.index]._version
        if place is not None:
            self.stride, self.offset, self.lazy_bits = place.stride, place.offset, place.lazy_bits
            # As long as it shares the parameter's version, torch checks that.
            version = unit.parameters[place.slot.index]._version
            self.tensor_version = version if tensor._version == version else None
        unit.saved_references.add(weakref.ref(self, unit.saved_references.discard))

    def check(self) -> None:
        """Raise if the weights are not those any more that forward used."""
        unit = self.unit
        if unit.version != self.version:
            raise RuntimeError(
                f"backward needs the weights of unit {unit.name} as they were in forward, but they have been changed by "
                "an optimizer step since. Run forward again"
            )
        # Only a unit that is bound, or was written to while it was, can have another version.
        if (unit.has_been_written or unit.is_bound) and self.tensor_version is not None:
            slot = unit.slot_at(int(self.offset) * self.dtype.itemsize)
            if slot is not None and unit.parameters[slot.index]._version != self.tensor_version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"parameter '{slot.spec.fqn}', of shape {list(slot.spec.shape)}, after forward had used it"
                )

    def view(self) -> torch.Tensor:
        """The view itself, of a unit that is in memory."""
        if self.unit.flat is None:
            raise RuntimeError(f"unit {self.unit.name} is not resident after a touch")
        memory, start = self.kept or (self.unit.flat.tensor(), 0)
        offset = self.offset - start // self.dtype.itemsize
        view = memory.view(self.dtype).as_strided(self.shape, self.stride, offset)
        return view if self.lazy_bits == (False, False) else with_lazy_bits(view, self.lazy_bits)


@dataclass(slots=True, eq=False)
class PackedByAnother:
    """Stands for another engine's weight, by its packed form (see [Note: several engines]), or for a DTensor, by its part's."""

    _packed: Any
    _unpack: Callable[[Any], torch.Tensor]

    def load(self) -> torch.Tensor:
        """The tensor again."""
        return self._unpack(self._packed)


def keep_saved(unit: Unit, slot: Slot, copy: Callable[[], torch.Tensor]) -> None:
    """The parameter's ``data`` is about to be assigned. In torch it gets other memory then: saved views look at the old one.

    ``copy`` gives a copy of the parameter, with its strides.
    """
    views = [
        packed
        for packed in unit.saved_tensors()
        if isinstance(packed, PackedSavedTensor)
        and not packed.is_parameter
        and packed.kept is None
        and 0 <= int(packed.offset) * packed.dtype.itemsize - slot.offset_bytes < slot.numel * slot.spec.dtype.itemsize
    ]
    if views:
        kept = copy().as_strided((slot.numel,), (1,)).view(torch.uint8)
        for view in views:
            view.kept = kept, slot.offset_bytes


def modified(tensor: torch.Tensor, version: int, shape: Sequence[int] | None = None) -> RuntimeError:
    """What torch says of a saved tensor, of this ``shape``, that has been written to since it had this version."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(tensor.shape if shape is None else shape)} is at version {tensor._version}, expected version {version}"
    )


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost pack and unpack hooks of the calling thread; None without any."""
    top: tuple[Any, Any] | None = saving_hooks._top_saved_tensors_default_hooks(True)
    return top


_CHECKPOINTING = "torch.utils.checkpoint"
"""Module of the hooks that non-reentrant activation checkpointing puts up."""
_MOVING_ONLY = "torch.autograd.graph"


def hooks_of_the_user() -> tuple[Any, Any] | None:
    """The hooks for what the calling thread saves, unless they are this package's or those of activation checkpointing."""
    top = top_hooks()
    if top is None:
        return None
    pack = top[0]
    if isinstance(pack, functools.partial) and getattr(pack.func, "__func__", None) is SavingHooks._pack_over:
        theirs: tuple[Any, Any] = pack.args[0]  # covered by ours
        return theirs
    home = _home(pack)
    return None if home == _CHECKPOINTING or home.startswith("infinity.") else top


def is_checkpointed() -> bool:
    """Whether what the calling thread saves goes to activation checkpointing, perhaps through hooks of ours."""
    top = top_hooks()
    pack = None if top is None else top[0]
    while isinstance(pack, functools.partial) and getattr(pack.func, "__func__", None) is SavingHooks._pack_for:
        pack = pack.args[0]
    return _home(pack) == _CHECKPOINTING


def is_saved_otherwise() -> bool:
    """Whether hooks of the user see or change what the calling thread saves, and do not only move it."""
    theirs = hooks_of_the_user()
    return theirs is not None and _home(theirs[0]) != _MOVING_ONLY


def _home(pack: Any) -> str:
    return str(getattr(getattr(pack, "func", pack), "__module__", ""))


def hooks_are_forbidden() -> bool:
    """Whether torch allows no hooks: then what is saved are weights themselves, whose units have to stay open."""
    return saving_hooks._saved_tensors_hooks_get_disabled_error_message() is not None


in_use: dict[int, weakref.ref[SavingHooks]] = {}
"""Those of engines that are open, by ``id``: see [Note: several engines]."""
HOOKS_OF_AN_ENGINE = 2


@dataclass(slots=True, eq=False)
class _PackedByUser:
    """What the user's hooks gave for a tensor, with packed ones in the place of weights."""

    packed: Any


def _exchanged(packed: Any, kind: type | tuple[type, ...], exchange: Callable[[Any], Any]) -> Any:
    """``packed`` with each object of these classes in it exchanged, as far as it is one or consists of lists and the like."""
    if isinstance(packed, kind):
        return exchange(packed)
    if type(packed) in (tuple, list):
        return type(packed)([_exchanged(part, kind, exchange) for part in packed])
    if type(packed) is dict:
        return {key: _exchanged(part, kind, exchange) for key, part in packed.items()}
    return packed


@dataclass(eq=False)
class SavingHooks:
    """One owner's pack and unpack hooks. As a context manager they are up inside the ``with`` block."""

    _pack: Callable[[torch.Tensor], Any]
    _unpack: Callable[[Any], torch.Tensor]
    """As for ``torch.autograd.graph.saved_tensors_hooks``, as `_pack` is."""
    _packed_for: Callable[[torch.Tensor], PackedSavedTensor | None]
    """What `_pack` gives for a view of a weight of the owner's; None for anything else."""
    _below: tuple[Any, Any] | None = None
    """The hooks above which they were put up last, until they are taken down."""

    def __post_init__(self) -> None:
        me = id(self)
        in_use[me] = weakref.ref(self, lambda _: in_use.pop(me, None))

    def close(self) -> None:
        """What the calling thread has of them is taken down: contexts of the user take down what is innermost."""
        self.pop(most=None)
        in_use.pop(id(self), None)

    def push(self) -> None:
        """Put them up in the calling thread. Where torch.func forbids hooks, what is saved keeps the flat buffers alive.

        In a recomputation inside backward, too: without any, autograd keeps a leaf itself, and what it computes with then is
        whatever the parameter is bound to by that time.
        """
        if hooks_are_forbidden():
            return
        ours: tuple[Any, Any] = self._pack, self._unpack
        if is_checkpointed():
            collect, give = saving_hooks._top_saved_tensors_default_hooks(True)
            ours = functools.partial(self._pack_for, collect), functools.partial(self._unpack_for, give)
        elif (theirs := hooks_of_the_user()) is not None:
            ours = functools.partial(self._pack_over, theirs), functools.partial(self._unpack_over, theirs)
        self._below = top_hooks()
        saving_hooks._push_saved_tensors_default_hooks(*ours)

    def _pack_over(self, theirs: tuple[Any, Any], tensor: torch.Tensor) -> Any:
        """As ``pack``, where hooks of the user are covered: see [Note: hooks of the user]."""
        collect = theirs[0]
        if _home(collect) == _MOVING_ONLY:
            packed = self._packed_for_any(tensor)
            if packed is not None:
                return packed
        return _PackedByUser(_exchanged(collect(tensor), torch.Tensor, lambda leaf: self._packed_for_any(leaf) or leaf))

    def _packed_for_any(self, tensor: torch.Tensor) -> PackedSavedTensor | PackedByAnother | None:
        return self._packed_for(tensor) or self.packed_by_another(tensor)

    def packed_by_another(self, tensor: torch.Tensor) -> PackedByAnother | None:
        """The packed form of a view of another engine's weight; None for anything else."""
        for hooks in [reference() for reference in tuple(in_use.values())]:
            if hooks is not None and hooks._packed_for != self._packed_for:
                packed = hooks._packed_for(tensor)
                if packed is not None:
                    return PackedByAnother(packed, hooks._unpack)
        return None

    def _unpack_over(self, theirs: tuple[Any, Any], saved: Any) -> torch.Tensor:
        if not isinstance(saved, _PackedByUser):
            return self._unpack(saved)
        give: Callable[[Any], torch.Tensor] = theirs[1]
        return give(_exchanged(saved.packed, (PackedSavedTensor, PackedByAnother), self._unpack))

    def _pack_for(self, collect: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        # The checkpoint's hooks keep what needs no gradient itself, and a weight may lose its memory: they get a view.
        packed = collect(tensor.detach())
        return self._packed_for_any(tensor) or packed

    def _unpack_for(self, give: Callable[[Any], torch.Tensor], saved: Any) -> torch.Tensor:
        return self._unpack(saved) if isinstance(saved, PackedSavedTensor | PackedByAnother) else give(saved)

    def _are(self, hooks: tuple[Any, Any]) -> bool:
        pack = hooks[0]
        return bool(
            pack == self._pack
            or (isinstance(pack, functools.partial) and pack.func in (self._pack_for, self._pack_over))
        )

    @property
    def are_up(self) -> bool:
        """Whether they are the innermost of the calling thread."""
        return (top := top_hooks()) is not None and self._are(top)

    def pop(self, most: int | None = 1, are_these: Callable[[tuple[Any, Any]], bool] | None = None) -> int:
        """Take the innermost down, if any are up; None: all, as after an interrupt. Those of others stay, wherever they are.

        ``are_these``: whether hooks are those to take down; by default ours. Returns the number of those that were up.
        """
        others: list[tuple[Any, Any]] = []
        num_found, self._below = 0, None
        try:
            while num_found != most and (top := top_hooks()) is not None:
                saving_hooks._pop_saved_tensors_default_hooks()
                if (are_these or self._are)(top):
                    num_found += 1
                else:
                    others.append(top)
        finally:
            for hooks in reversed(others):
                saving_hooks._push_saved_tensors_default_hooks(*hooks)
        return num_found

    def abandon(self) -> None:
        """What they were up for was cut off: see [Note: interrupted hooks]."""
        below = self._below
        if not self.pop(most=None) and below is not None:
            self.pop(are_these=functools.partial(operator.eq, below))

    def __enter__(self) -> None:
        self.push()

    def __exit__(self, *failure: Any) -> None:
        self.pop()

    def clear_top(self) -> None:
        """Take down those that nobody else's are above."""
        while (top := top_hooks()) is not None and self._are(top):
            saving_hooks._pop_saved_tensors_default_hooks()
