"""What a parameter is while an engine holds it: two subclasses of ``nn.Parameter`` that are swapped in and out.

A parameter keeps its identity, shape, dtype and device all the time. While its unit is open it is a
`ResidentParameter`, which computes like any parameter. Otherwise it is a `PagedParameter`, whose data is one element
expanded to the right shape: any operation on it goes to its coordinator, which fetches the unit (in forward and backward),
answers from a fetched copy, or raises `AccessError`. What torch does not ask the class about (functorch's
transforms, compiled functions, C++) gets an error from the placeholder, or NaN.

[Note: seen by version]
A write to a weight has to be noticed. torch counts writes in a tensor's version, which all views share, and so does what
``detach()`` gives; but what ``.data`` gives has a count of its own. So `_HeldParameter.data` hands out views of one tensor per
parameter, its `.data` alias (``Unit.data_alias``): parameter and `.data` alias outlive all views, and their two versions tell
of every write. They are two because torch does not mind a write by ``.data`` between forward and backward, but does mind
others. Outside of forward and backward a view of a weight (``p.data``, ``p.detach()``, ``p[0]`` without gradients) is a
`PagedView`: it holds no memory but says which part of which unit it stands for, and each operation on it pages the unit as one
on the parameter does. So it shows what the weight is at that moment, and what is written to it is written to the weight.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from infinity.distributed.process_groups import num_processes
from infinity.errors import AccessError, ModelError
from infinity.threads.engine_lock import guard, is_inside
from infinity.torch_internals.names import as_plain, forbid_access, outside_modes, unrecorded, untraced
from infinity.torch_internals.operations import METADATA, WRITING_METHODS, is_conversion_to_the_same, leaves, name_of

if TYPE_CHECKING:
    from infinity.units.layout import Slot

HeldTensor = Any
"""A `PagedParameter` or a `PagedView`."""


ParameterHost = Any
"""Whoever holds a parameter's values, and answers for it: a `ParameterHandler`, which is of a layer above."""


_hosts: Any = WeakIdKeyDictionary()
"""Side table: parameter -> weak reference to its ParameterHost. Tensors get no attributes of ours."""


def host_of(parameter: torch.Tensor) -> ParameterHost | None:
    """The engine part that holds ``parameter``, or None for a parameter nobody holds."""
    if isinstance(parameter, PagedView):
        return parameter.place.host()
    reference = _hosts.get(parameter)
    host: ParameterHost | None = reference() if reference is not None else None
    return host


class ZeroParamStatus(Enum):
    """What DeepSpeed's ``parameter.ds_status`` says."""

    AVAILABLE = 1
    """Its values can be had as those of any tensor."""
    NOT_AVAILABLE = 2
    """It is paged out."""
    INFLIGHT = 3
    """Never: whoever asks waits."""


class _HeldParameter(nn.Parameter):
    """Common to both states: gradients live with the engine, so ``grad`` asks there; ``data`` is watched."""

    @property
    def ds_id(self) -> int:
        """A number of this parameter's own, by which scripts for DeepSpeed know that it may be paged out."""
        return id(self)

    @property
    def ds_numel(self) -> int:
        """As ``numel()``, which is never that of a part."""
        return self.numel()

    @property
    def ds_shape(self) -> torch.Size:
        """As ``shape``."""
        return self.shape

    def partition_numel(self) -> int:
        """How many elements one of the processes has to itself, rounded up: DeepSpeed's count, which Lightning shows."""
        return -(-self.numel() // num_processes())

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether it has its values at this moment."""
        return ZeroParamStatus.NOT_AVAILABLE if isinstance(self, PagedParameter) else ZeroParamStatus.AVAILABLE

    @property
    def grad(self) -> torch.Tensor | None:
        host = host_of(self)
        if host is None:
            return plain_grad(self)
        return None if _is_converted_to_the_same(self, sys._getframe(1)) else host.gradient_of(self)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        host = host_of(self)
        if host is None:
            set_plain_grad(self, gradient)
        else:
            host.set_gradient(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        host = host_of(self)
        if host is None:
            raise _dropped(".data")
        data: torch.Tensor = host.data_of(self)
        return data

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        host = host_of(self)
        if host is None:
            raise _dropped("assigning .data")
        host.set_data(self, values)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # of this one torch does not ask the class
        """As torch's; what a tensor brings is copied, as by assigning ``data``. Memory without a tensor is refused."""
        host = host_of(self)
        if host is None:
            raise _dropped("set_")
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            fqn = host.slot_of(self).spec.fqn
            raise ModelError(
                f"parameter '{fqn}' cannot be given other memory by set_ while an engine holds it",
                cure="Copy the values: parameter.data.copy_(...)",
                fqn=fqn,
            )
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if args[0] is self:  # register_parametrization does so; a count of a write would be one to the drive
            return self
        host.set_data(self, args[0])
        torch.autograd.graph.increment_version(self)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        try:
            return repr(_plain_copy(self))
        except Exception as error:  # whoever prints a model that cannot be read now wants to see why
            shape, dtype = tuple(self.shape), self.dtype
            return (
                f"Parameter containing:\ntensor(..., size={shape}, dtype={dtype}) whose values cannot be shown: {error}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the true values: a deep copy of a model is a model that no engine holds."""
        if id(self) not in memo:
            memo[id(self)] = _plain_copy(self)
        copy: nn.Parameter = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy = _plain_copy(self)
        copy.__dict__.update(self.__dict__)  # what a script has noted on it
        return nn.Parameter.__reduce_ex__(copy, protocol)


def _guarded(*arguments: Any) -> Any:
    return _operate(*arguments)


_guard = guard(_guarded)


class _Guarded(type(nn.Parameter)):  # type: ignore[misc]  # torch does not export it
    """Of a class that shows its ``__torch_function__`` as its instances do: functions written in Python look there."""

    __torch_function__ = _guard


class ResidentParameter(_HeldParameter, metaclass=_Guarded):
    """A parameter whose values are in its unit's open flat buffer."""

    __torch_function__ = _guard
    """None for the thread whose call is inside: to others the weight is paged out, and the engine is busy."""


_NEW_PARAMETER = nn.Parameter.__new__.__code__


def _refuse_new_parameter(parameter: nn.Parameter, caller: FrameType | None) -> None:
    """Raise if ``caller`` makes an ``nn.Parameter`` of a held one: torch's message would blame our classes for it."""
    host = host_of(parameter)
    if host is not None and caller is not None and caller.f_code is _NEW_PARAMETER:
        fqn = host.slot_of(parameter).spec.fqn
        raise ModelError(
            f"nn.Parameter of parameter '{fqn}', which an engine holds, would share its memory, and that comes and goes. "
            "Parametrizations (weight_norm) make such ones, and conversions under the flags of torch.__future__",
            cure="Register parametrizations before infinity.initialize, and leave those flags at False. For a parameter with "
            "values of its own, take nn.Parameter(weight.detach().clone())",
            fqn=fqn,
        )


def _watched(name: str) -> Callable[..., Any]:
    """A method of a tensor that writes to it, or gives a view to write to, and says so before."""

    def write(self: ResidentParameter, *args: Any, **kwargs: Any) -> Any:
        if name == "detach" and not torch.compiler.is_compiling():
            _refuse_new_parameter(self, sys._getframe(1))
        host = host_of(self)
        if host is not None:
            host.before_write(self)
        return getattr(torch.Tensor, name)(self, *args, **kwargs)  # as it is now: it may be watched itself

    write.__name__ = name
    write.__doc__ = getattr(torch.Tensor, name).__doc__
    return write


for _name in (*WRITING_METHODS, "detach"):
    if _name not in vars(_HeldParameter):
        setattr(ResidentParameter, _name, _watched(_name))


class PagedParameter(_HeldParameter):
    """A parameter whose values are elsewhere. See the module's docstring."""

    def detach(self) -> torch.Tensor:
        _refuse_new_parameter(self, sys._getframe(1))
        return super().detach()

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _operate(func, types, args, kwargs)


@dataclass(frozen=True)
class Place:
    """What a `PagedView` stands for: elements of a parameter, in the flat buffer of its unit."""

    host: weakref.ref[ParameterHost]
    unit: Any
    slot: Slot
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Of the first element, in elements of ``dtype`` from the beginning of the flat buffer."""
    bits: tuple[bool, bool] = (False, False)
    """See `infinity.torch_internals.names.lazy_bits`."""


class PagedView(torch.Tensor):
    """A tensor that stands for a part of a weight that may be paged out. See [Note: seen by version]."""

    place: Place

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _operate(func, types, args, kwargs)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        detach_view(self, values)

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # of this one torch does not ask the class
        """As torch's: the view looks at other memory then, and the parameter stays as it is."""
        with torch.no_grad():
            detach_view(self, torch.empty(0, dtype=self.dtype, device=self.device).set_(*args, **kwargs))
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch.no_grad():
            return repr(self.detach().clone().requires_grad_(self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        copy: torch.Tensor = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


_APPLY = nn.Module._apply.__code__


def _is_converted_to_the_same(parameter: nn.Parameter, caller: FrameType) -> bool:
    """Whether it is ``module.to(...)`` that asks for the gradient, and leaves the parameter as it is: then the gradient, too.

    The routers of Switch Transformers and NLLB-MoE convert themselves in each forward. In one of several micro-batches that go
    through the model together there is no gradient to be looked at.
    """
    return caller.f_code is _APPLY and caller.f_locals.get("param_applied") is parameter


@untraced
def _operate(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """An operation gets parameters, or views of some, that it may not compute with as they are."""
    kwargs = kwargs or {}
    if func in METADATA:
        with as_plain():
            return func(*args, **kwargs)
    kinds = (PagedParameter if is_inside() else _HeldParameter, PagedView)
    tensors: list[Any] = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, kinds)]
    if not tensors:
        return func(*args, **kwargs)  # another thread has opened them a moment ago
    first = tensors[0]
    host = host_of(first)
    if host is None:
        raise _dropped(name_of(func))
    if func in _DIFFERENTIATING and not any(
        isinstance(leaf, kinds) for leaf in leaves((args[:1], kwargs.get("grad_outputs")))
    ):
        return _differentiate(func, args, kwargs)
    if first is args[0] if args else False:
        if func is torch.Tensor.stride and len(args) == 1 and not kwargs:
            return first.place.stride if isinstance(first, PagedView) else host.slot_of(first).spec.stride
        if is_conversion_to_the_same(func, args, kwargs, first):
            return first
    return host.operate(func, args, kwargs, tensors)


def _dropped(operation: str) -> AccessError:
    return AccessError.of_parameter(
        "?",
        operation=f"{operation}, after its engine was dropped,",
        cure="The weights went with the engine: keep it, and end with engine.close(), or save before",
    )


_DIFFERENTIATING: frozenset[Any] = frozenset([torch.autograd.grad, torch.autograd.backward])


def _differentiate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Derivatives with respect to parameters need no values of theirs: places in the graph stand for them."""
    inputs = args[1] if len(args) > 1 else kwargs.pop("inputs")
    fills = bool(kwargs.pop("materialize_grads", False))  # torch wants tensors for that
    if fills:
        kwargs["allow_unused"] = True
    with as_plain():
        edges = [get_gradient_edge(leaf) if isinstance(leaf, _HeldParameter | PagedView) else leaf for leaf in inputs]
    found = func(args[0], inputs=edges, **kwargs)
    if not fills:
        return found
    creates_graph = bool(kwargs.get("create_graph"))
    return tuple(
        torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device, requires_grad=creates_graph)
        if one is None
        else one
        for one, leaf in zip(found, inputs, strict=True)
    )


def _plain_copy(parameter: nn.Parameter) -> nn.Parameter:
    host = host_of(parameter)
    values = host.copy_of(parameter) if host is not None else plain_data(parameter).clone()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def hold(parameter: nn.Parameter, host: ParameterHost, dtype: torch.dtype, device: torch.device) -> None:
    """``host`` answers for ``parameter`` from now on, which becomes paged out, with ``dtype``, on ``device``."""
    _hosts[parameter] = weakref.ref(host)
    parameter.data = placeholder(dtype, device, parameter.shape)
    parameter.__class__ = PagedParameter


def release_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """The parameters are ordinary again: whatever data they have is theirs."""
    for parameter in parameters:
        _hosts.pop(parameter, None)
        parameter.__class__ = nn.Parameter


def bind(parameters: Iterable[nn.Parameter], values: Iterable[torch.Tensor]) -> None:
    """Each of ``parameters`` computes with its ``values`` (same shape and dtype), which it does not own."""
    with as_plain(), unrecorded():
        for parameter, its_values in zip(parameters, values, strict=True):
            _DATA_FIELD.__set__(parameter, its_values)
            parameter.__class__ = ResidentParameter


def unbind(parameters: Iterable[nn.Parameter], placeholders: Iterable[torch.Tensor]) -> None:
    """Each of ``parameters`` gives up its data: a placeholder has its shape, dtype and device."""
    with as_plain(), unrecorded():
        for parameter, its_placeholder in zip(parameters, placeholders, strict=True):
            parameter.__class__ = PagedParameter
            _DATA_FIELD.__set__(parameter, its_placeholder)


def empty(tensor: torch.Tensor) -> None:
    """``tensor`` gives up its data; a placeholder keeps shape, dtype and device."""
    with as_plain():
        set_plain_data(tensor, placeholder(tensor.dtype, tensor.device, tensor.shape))


def make_view(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """``tensor``, a view of a weight or of its `.data` alias, holds no memory any more, but stands for its place."""
    empty(tensor)
    tensor.__class__ = PagedView
    view: Any = tensor
    view.place = place
    return tensor


def _make(tensor: Any, kind: type) -> None:
    tensor.__class__ = kind


def bind_view(view: PagedView, values: torch.Tensor) -> None:
    """``view`` is an ordinary tensor over ``values`` until `unbind_view`."""
    _make(view, torch.Tensor)
    set_plain_data(view, values)


def unbind_view(view: torch.Tensor) -> None:
    """The counterpart of `bind_view`."""
    empty(view)
    _make(view, PagedView)


def detach_view(view: torch.Tensor, values: torch.Tensor) -> None:
    """``view`` stands for a weight no longer: it is an ordinary tensor over ``values``."""
    if isinstance(view, PagedView):
        del view.__dict__["place"]
        _make(view, torch.Tensor)
    set_plain_data(view, values)


_NO_VALUES = (
    "the values of this parameter are not in memory: compiled functions and functorch's transforms cannot fetch them. Use "
    "`with infinity.GatheredParameters(...)` around the call"
)
_placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


@outside_modes
def placeholder(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> torch.Tensor:
    """What a paged-out parameter is bound to: one element for all, which no kernel may write to, nor read where torch can
    forbid that. It has memory: a freed storage would end the process where a kernel reads it."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)  # nothing is missing
    if (dtype, device) not in _placeholders:
        filling = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        _placeholders[dtype, device] = torch.full((), filling, dtype=dtype, device=device)
        forbid_access(_placeholders[dtype, device], _NO_VALUES)
    with unrecorded():
        return _placeholders[dtype, device].expand(shape)


_DATA_FIELD: Any = torch.Tensor.data


def plain_data(tensor: torch.Tensor) -> torch.Tensor:
    """What torch itself gives as ``tensor.data``."""
    with as_plain():
        data: torch.Tensor = _DATA_FIELD.__get__(tensor)
    return data


def set_plain_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give ``tensor`` other memory; its version stays."""
    with as_plain(), unrecorded():
        _DATA_FIELD.__set__(tensor, values)


AUTOGRAD_FIELD: Any = torch.Tensor.grad
"""The gradient that autograd has: `plain_grad` and `set_plain_grad` read and write it."""


def plain_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd put into the parameter, whatever the engine says about it."""
    with as_plain():
        gradient: torch.Tensor | None = AUTOGRAD_FIELD.__get__(parameter)
    return gradient


def set_plain_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set or clear the gradient that autograd accumulates into."""
    with as_plain():
        AUTOGRAD_FIELD.__set__(parameter, gradient)


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """As ``register_post_accumulate_grad_hook``, for a frozen parameter as well: it may be thawed. Returns the handle."""
    with as_plain():
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            return parameter.register_post_accumulate_grad_hook(hook)
        finally:
            parameter.requires_grad_(requires_grad)
