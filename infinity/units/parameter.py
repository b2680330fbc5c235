"""The classes of a parameter while an engine holds it: two subclasses of ``nn.Parameter``, exchanged by ``__class__``.

A parameter keeps its identity, shape, dtype and device. While its unit is in memory and in use it is a
`ResidentParameter`, which computes like any parameter. Otherwise it is a `PagedParameter`, whose data is one element
expanded to the right shape. An operation on that goes to its host, which fetches the unit, computes on a copy, or
raises `AccessError`. Code that does not ask a tensor's class (functorch's transforms, compiled functions, C++) gets an
error from the placeholder, or NaN.

[Note: seen by version]
The engine has to notice writes to weights. torch counts them in a tensor's version, which views and ``detach()`` share.
What ``.data`` returns has a version of its own. So `_HeldParameter.data` returns views of one tensor per parameter, its
`.data` alias (``Unit.data_alias``). Parameter and alias outlive all views, so their two versions count every write.
There are two because torch allows a write by ``.data`` between forward and backward, and no others.
Outside of forward and backward a view of a weight (``p.data``, ``p.detach()``, ``p[0]`` without gradients) is a
`PagedView`. It holds no memory, only the place that it stands for, and each operation on it pages the unit as one on
the parameter does. So it shows the present weight, and a write to it is a write to the weight.
"""

from __future__ import annotations

import functools
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
from infinity.torch_internals.names import forbid_access, outside_modes, unprofiled, untraced, without_torch_function
from infinity.torch_internals.operations import METADATA, WRITING_METHODS, is_conversion_to_the_same, leaves, name_of

if TYPE_CHECKING:
    from infinity.units.layout import Slot

HeldTensor = Any
"""A `PagedParameter` or a `PagedView`."""


ParameterHost = Any
"""Holds a parameter's values and answers for it: a `ParameterHandler`. That is of a layer above, hence no import."""


_hosts: Any = WeakIdKeyDictionary()
"""Parameter -> weak reference to its ParameterHost."""
# A side table, because attributes of a parameter are pickled with it. Both sides are weak: the table keeps neither a
# dropped model nor a dropped engine alive.


def host_of(parameter: torch.Tensor) -> ParameterHost | None:
    """The host of a parameter or view; None if no engine holds it, or its engine is gone."""
    if isinstance(parameter, PagedView):
        return parameter.place.host()
    reference = _hosts.get(parameter)
    host: ParameterHost | None = reference() if reference is not None else None
    return host


class ZeroParamStatus(Enum):
    """The values of DeepSpeed's ``parameter.ds_status``."""

    AVAILABLE = 1
    """The values are in memory."""
    NOT_AVAILABLE = 2
    """It is paged out."""
    INFLIGHT = 3
    """Never returned: an access waits until the values have arrived."""


class _HeldParameter(nn.Parameter):
    """Common to both states: ``grad`` asks the engine, which keeps gradients, and ``data`` is watched for writes."""

    # `ds_*` and `partition_numel` are DeepSpeed's attributes. transformers and PEFT read `ds_numel` to count
    # parameters, Lightning's model summary also `partition_numel`.

    ds_id = property(id, doc="A number that is unique to this parameter.")
    ds_numel = property(torch.Tensor.numel, doc="As ``numel()``: here that always counts the whole parameter.")
    ds_shape = property(lambda self: self.shape, doc="As ``shape``.")

    def partition_numel(self) -> int:
        """Elements per process, rounded up: DeepSpeed's count, which Lightning shows."""
        return -(-self.numel() // num_processes())

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether its values are in memory at this moment."""
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

    # torch's set_ does not consult __torch_function__, so the method itself is replaced.
    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Copy the values of a tensor, as assigning ``data`` does. A storage is refused."""
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
        # register_parametrization sets a parameter to itself, and PEFT's target_parameters registers one in each
        # forward. Counted as a write, it would send the weight to the drive each time.
        if args[0] is self:
            return self
        host.set_data(self, args[0])
        torch.autograd.graph.increment_version(self)
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        try:
            return repr(_plain_copy(self))
        except Exception as error:  # printing a model must not fail: the text says why there are no values
            shape, dtype = tuple(self.shape), self.dtype
            return (
                f"Parameter containing:\ntensor(..., size={shape}, dtype={dtype}) whose values cannot be shown: {error}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the true values: a deep copy of a model is a model that no engine holds."""
        return _plain_copy(self)  # `copy.deepcopy` remembers it for tied modules

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy = _plain_copy(self)
        copy.__dict__.update(self.__dict__)  # attributes that a script has set
        return nn.Parameter.__reduce_ex__(copy, protocol)


@untraced
def _operate(
    _: Any, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run a torch function that was given parameters or views without values: their ``__torch_function__``."""
    kwargs = kwargs or {}
    if func in METADATA:
        with without_torch_function():
            return func(*args, **kwargs)
    # For a thread that holds no engine, resident parameters are as unusable as paged ones: another thread's call may
    # evict them.
    kinds = (PagedParameter if is_inside() else _HeldParameter, PagedView)
    tensors: list[Any] = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, kinds)]
    if not tensors:
        # A class may change between torch's look at it and this line, when another thread binds the unit.
        return func(*args, **kwargs)
    first = tensors[0]
    host = host_of(first)
    if host is None:
        raise _dropped(name_of(func))
    # A held tensor among the outputs (or their gradients) needs values. Held tensors among the inputs do not.
    if func in _DIFFERENTIATING and not any(
        isinstance(leaf, kinds) for leaf in leaves((args[:1], kwargs.get("grad_outputs")))
    ):
        return _differentiate(func, args, kwargs)
    if first is args[0] if args else False:
        # The placeholder is an expanded element with strides of 0, so strides come from the layout.
        if func is torch.Tensor.stride and len(args) == 1 and not kwargs:
            return first.place.stride if isinstance(first, PagedView) else host.slot_of(first).spec.stride
        if is_conversion_to_the_same(func, args, kwargs, first):
            return first
    return host.operate(func, args, kwargs, tensors)


# A property that gives torch's "no override" to threads whose call holds an engine, and `_operate` to all others. A
# thread that trains therefore pays no call of Python for an operation on a bound weight.
_guard = guard(functools.partial(_operate, None))


class _Guarded(type(nn.Parameter)):  # type: ignore[misc]  # torch does not export it
    """Metaclass of `ResidentParameter`, for functions in Python that read ``type(tensor).__torch_function__``."""

    # `_guard` is a property, which an access by the class itself would return as an object, and not evaluate.

    __torch_function__ = _guard


class ResidentParameter(_HeldParameter, metaclass=_Guarded):
    """A parameter whose values are in its unit's open flat buffer."""

    __torch_function__ = _guard
    """None for a thread whose call holds the engine. For others the weight counts as paged out, and the engine as
    busy."""


_NEW_PARAMETER = nn.Parameter.__new__.__code__


def _refuse_new_parameter(parameter: nn.Parameter, caller: FrameType | None) -> None:
    """Raise if ``caller`` is ``nn.Parameter.__new__``, which detaches a tensor to make a parameter of it."""
    # Without this, torch complains that `detach` returned another type, and names our classes as the culprits.
    host = host_of(parameter)
    if host is not None and caller is not None and caller.f_code is _NEW_PARAMETER:
        fqn = host.slot_of(parameter).spec.fqn
        raise ModelError(
            f"a new nn.Parameter over parameter '{fqn}' would share its memory, which the engine releases and "
            "refills. Parametrizations (weight_norm) make such parameters, and so do conversions under the flags of "
            "torch.__future__",
            cure="Register parametrizations before infinity.initialize, and leave those flags at False. For a "
            "parameter with its own values, use nn.Parameter(weight.detach().clone())",
            fqn=fqn,
        )


def _watched(name: str) -> Callable[..., Any]:
    """Wrap a method of a tensor that writes to it, or returns a view to write to: the host is told before the write."""
    # Told before, because a host may have to keep the old values (`Unit.save_before`).

    def write(self: ResidentParameter, *args: Any, **kwargs: Any) -> Any:
        if name == "detach" and not torch.compiler.is_compiling():
            _refuse_new_parameter(self, sys._getframe(1))
        host = host_of(self)
        if host is not None:
            host.before_write(self)
        # Looked up now: a script may have replaced torch's method meanwhile.
        return getattr(torch.Tensor, name)(self, *args, **kwargs)

    write.__name__ = name
    write.__doc__ = getattr(torch.Tensor, name).__doc__
    return write


# Methods on the class, and not __torch_function__: `_guard` gives the training thread none.
for _name in (*WRITING_METHODS, "detach"):
    if _name not in vars(_HeldParameter):
        setattr(ResidentParameter, _name, _watched(_name))


class PagedParameter(_HeldParameter):
    """A parameter whose values are not in memory. See the module's docstring."""

    def detach(self) -> torch.Tensor:
        _refuse_new_parameter(self, sys._getframe(1))
        return super().detach()

    __torch_function__ = classmethod(_operate)


@dataclass(frozen=True)
class ViewPlace:
    """Which elements of which parameter a `PagedView` stands for. Strides in elements."""

    host: weakref.ref[ParameterHost]
    unit: Any
    slot: Slot
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset of the first element in the flat buffer, in elements of ``dtype``."""
    lazy_bits: tuple[bool, bool] = (False, False)
    """See `infinity.torch_internals.names.lazy_bits`."""


class PagedView(torch.Tensor):
    """A view of a weight that may be paged out. See [Note: seen by version]."""

    place: ViewPlace

    __torch_function__ = classmethod(_operate)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        detach_view(self, values)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's: the view gets other memory, and no longer belongs to the parameter."""
        with torch.no_grad():
            detach_view(self, torch.empty(0, dtype=self.dtype, device=self.device).set_(*args, **kwargs))
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch.no_grad():
            return repr(self.detach().clone().requires_grad_(self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


_APPLY = nn.Module._apply.__code__


def _is_converted_to_the_same(parameter: nn.Parameter, caller: FrameType) -> bool:
    """Whether ``caller`` is ``nn.Module._apply`` (``module.to(...)``), and its conversion changed nothing."""
    # `_apply` reads the gradient of every parameter. The routers of Switch Transformers and NLLB-MoE convert themselves
    # in each forward. In a vertical step gradients cannot be read then, so the step would be refused for nothing.
    return caller.f_code is _APPLY and caller.f_locals.get("param_applied") is parameter


def _dropped(operation: str) -> AccessError:
    return AccessError.of_parameter(
        "?",
        operation=f"{operation}, after its engine was dropped,",
        cure="The weights were lost with the engine: keep a reference to it until engine.close(), or save before",
    )


_DIFFERENTIATING: frozenset[Any] = frozenset([torch.autograd.grad, torch.autograd.backward])


def _differentiate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``autograd.grad`` and ``backward`` with parameters as inputs: their gradient edges stand for them."""
    inputs = args[1] if len(args) > 1 else kwargs.pop("inputs")
    # torch makes zeros for unused inputs only from tensors, not from edges, so that is done here.
    fills = bool(kwargs.pop("materialize_grads", False))
    if fills:
        kwargs["allow_unused"] = True
    with without_torch_function():
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
    """Make ``parameter`` a paged one that ``host`` answers for, with ``dtype`` on ``device``. Its memory is
    released."""
    _hosts[parameter] = weakref.ref(host)
    parameter.data = placeholder(dtype, device, parameter.shape)
    parameter.__class__ = PagedParameter


def release_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Make the parameters ordinary ones again. They keep the data that they have."""
    for parameter in parameters:
        _hosts.pop(parameter, None)
        parameter.__class__ = nn.Parameter


def bind(parameters: Iterable[nn.Parameter], values: Iterable[torch.Tensor]) -> None:
    """Give each parameter its ``values`` (same shape and dtype), views of memory that the unit owns."""
    # Data before class: another thread that sees a ResidentParameter finds values in it. `unbind` is the reverse.
    with without_torch_function(), unprofiled():
        for parameter, its_values in zip(parameters, values, strict=True):
            _DATA_FIELD.__set__(parameter, its_values)
            parameter.__class__ = ResidentParameter


def unbind(parameters: Iterable[nn.Parameter], placeholders: Iterable[torch.Tensor]) -> None:
    """Replace each parameter's data by its placeholder."""
    with without_torch_function(), unprofiled():
        for parameter, its_placeholder in zip(parameters, placeholders, strict=True):
            parameter.__class__ = PagedParameter
            _DATA_FIELD.__set__(parameter, its_placeholder)


def empty(tensor: torch.Tensor) -> None:
    """Replace the data of ``tensor`` by a placeholder of its shape, dtype and device."""
    with without_torch_function():
        set_plain_data(tensor, placeholder(tensor.dtype, tensor.device, tensor.shape))


# Below, `Any` is a tensor whose class changes.


def make_view(view: Any, place: ViewPlace) -> torch.Tensor:
    """Turn ``view``, an ordinary view of a weight or of its `.data` alias, into a `PagedView` without memory."""
    unbind_view(view)
    view.place = place
    made: torch.Tensor = view
    return made


def bind_view(view: Any, values: torch.Tensor) -> None:
    """Turn ``view`` into an ordinary tensor over ``values`` for one operation, until `unbind_view`."""
    view.__class__ = torch.Tensor
    set_plain_data(view, values)


def unbind_view(view: Any) -> None:
    """Turn ``view`` into a `PagedView` without memory again."""
    empty(view)
    view.__class__ = PagedView


def detach_view(view: Any, values: torch.Tensor) -> None:
    """Turn ``view`` into an ordinary tensor over ``values``."""
    if isinstance(view, PagedView):
        del view.__dict__["place"]
        bind_view(view, values)  # for good
    else:
        set_plain_data(view, values)


_NO_VALUES = (
    "the values of this parameter are not in memory: compiled functions and functorch's transforms cannot fetch them. Use "
    "`with infinity.GatheredParameters(...)` around the call"
)
_placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


@outside_modes
def placeholder(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> torch.Tensor:
    """Data of a paged-out parameter: one NaN (0 for integers), expanded to ``shape``, shared per dtype and device."""
    # It has real memory: with a freed storage, a kernel that reads it would end the process. Writes are forbidden, and
    # reads too where the build of torch can do so (see `forbid_access`). Elsewhere NaN makes a wrong read visible.
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)  # nothing is missing
    if (dtype, device) not in _placeholders:
        filling = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        _placeholders[dtype, device] = torch.full((), filling, dtype=dtype, device=device)
        forbid_access(_placeholders[dtype, device], _NO_VALUES)
    with unprofiled():
        return _placeholders[dtype, device].expand(shape)


_DATA_FIELD: Any = torch.Tensor.data


def plain_data(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.data`` as torch itself returns it."""
    with without_torch_function():
        data: torch.Tensor = _DATA_FIELD.__get__(tensor)
    return data


def set_plain_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give ``tensor`` other memory. Its version does not change."""
    with without_torch_function(), unprofiled():
        _DATA_FIELD.__set__(tensor, values)


def alias(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor over the parameter's data, with a version of its own: see [Note: seen by version]."""
    # Not made as a view: a view holds its base tensor, and through that the flat buffer's memory.
    made = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    set_plain_data(made, plain_data(parameter))
    return made


AUTOGRAD_FIELD: Any = torch.Tensor.grad
"""The gradient that autograd has: `plain_grad` and `set_plain_grad` read and write it."""


def plain_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd itself holds for the parameter."""
    with without_torch_function():
        gradient: torch.Tensor | None = AUTOGRAD_FIELD.__get__(parameter)
    return gradient


def set_plain_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set or clear the tensor that autograd accumulates into."""
    with without_torch_function():
        AUTOGRAD_FIELD.__set__(parameter, gradient)


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """As ``register_post_accumulate_grad_hook``, also for a frozen parameter. Returns the handle."""
    # torch registers such a hook only on a tensor that requires a gradient. A frozen parameter may be thawed later.
    with without_torch_function():
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            return parameter.register_post_accumulate_grad_hook(hook)
        finally:
            parameter.requires_grad_(requires_grad)
