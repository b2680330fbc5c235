"""What a parameter is while an engine holds it: two subclasses of ``nn.Parameter`` that are swapped in and out.

A parameter keeps its identity, shape, dtype and device all the time. While its unit is open it is a
`ResidentParameter`, which computes like any parameter. Otherwise it is a `PagedParameter`, whose data is one element
expanded to the right shape: any operation on it goes to its pager, which fetches the unit (in forward and backward),
answers from a fetched copy, or raises `ParameterNotResidentError`. Nothing ever computes with the placeholder.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import ParameterNotResidentError

if TYPE_CHECKING:
    from infinity.layout import Slot


class ParameterHost(Protocol):
    """Whoever holds a parameter's values: answers operations on it while it is paged out, and gives its gradient."""

    def operate(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: list[nn.Parameter],
    ) -> Any:
        """Run ``function`` although ``parameters`` among its arguments are paged out, or raise."""
        ...

    def copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of the parameter's values, as a plain tensor."""
        ...

    def gradient_of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What ``parameter.grad`` gives."""
        ...

    def set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """What assigning ``parameter.grad`` does."""
        ...

    def slot_of(self, parameter: nn.Parameter) -> Slot:
        """Where the parameter lies in its unit."""
        ...


_hosts: Any = WeakIdKeyDictionary()
"""Side table: parameter -> weak reference to its ParameterHost. Tensors get no attributes of ours."""


def host_of(parameter: torch.Tensor) -> ParameterHost | None:
    """The engine part that holds ``parameter``, or None for a parameter nobody holds."""
    reference = _hosts.get(parameter)
    host: ParameterHost | None = reference() if reference is not None else None
    return host


class _HeldParameter(nn.Parameter):
    """Common to both states: gradients live with the engine, so ``grad`` asks there."""

    @property
    def grad(self) -> torch.Tensor | None:
        host = host_of(self)
        return plain_grad(self) if host is None else host.gradient_of(self)

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


class ResidentParameter(_HeldParameter):
    """A parameter whose values are in its unit's open flat buffer."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter.__reduce_ex__(_plain_copy(self), protocol)


class PagedParameter(_HeldParameter):
    """A parameter whose values are elsewhere. See the module's docstring."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        paged = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, PagedParameter)]
        host = host_of(paged[0])
        if host is None:
            raise ParameterNotResidentError(
                "?", operation=f"{getattr(func, '__name__', func)}, after its engine was dropped,"
            )
        if func is torch.Tensor.stride and len(args) == 1 and not kwargs:
            return host.slot_of(paged[0]).spec.stride
        return host.operate(func, args, kwargs, list(paged))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter.__reduce_ex__(_plain_copy(self), protocol)


def _plain_copy(parameter: nn.Parameter) -> nn.Parameter:
    host = host_of(parameter)
    values = host.copy_of(parameter) if host is not None else parameter.data.clone()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A plain parameter with the true values: a deep copy of a model is a model that no engine holds."""
    if id(parameter) not in memo:
        memo[id(parameter)] = _plain_copy(parameter)
    copy: nn.Parameter = memo[id(parameter)]
    return copy


def _property(name: str) -> list[Any]:
    descriptor = getattr(torch.Tensor, name, None)
    return [descriptor.__get__] if descriptor is not None else []


_METADATA: frozenset[Any] = frozenset(
    [
        getter
        for name in (
            "shape",
            "dtype",
            "device",
            "requires_grad",
            "is_leaf",
            "ndim",
            "layout",
            "grad_fn",
            "names",
            "itemsize",
            "nbytes",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_mps",
            "is_xpu",
            "is_nested",
            "is_mkldnn",
            "is_sparse_csr",
            "is_vulkan",
            "is_ipu",
            "is_maia",
            "is_mtia",
            "is_xla",
            "retains_grad",
            "output_nr",
            "_version",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
            "name",
            "_base",
            "_grad",
        )
        for getter in _property(name)
    ]
    + [
        getattr(torch.Tensor, name).__set__
        for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
        if hasattr(torch.Tensor, name)
    ]
    + [
        getattr(torch.Tensor, name)
        for name in (
            "numel",
            "nelement",
            "dim",
            "ndimension",
            "size",
            "element_size",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "get_device",
            "requires_grad_",
            "register_hook",
            "register_post_accumulate_grad_hook",
            "__hash__",
            "__len__",
            "_is_view",
            "is_inference",
            "has_names",
            "is_neg",
            "is_conj",
            "is_set_to",
            "is_same_size",
        )
        if hasattr(torch.Tensor, name)
    ]
    + [
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch.is_same_size,
        torch.result_type,
        torch._has_compatible_shallow_copy_type,
    ]
)
"""Operations that look at the metadata only, which the placeholder answers truthfully."""


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists, dicts and their subclasses."""
    if isinstance(tree, tuple | list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


def hold(parameter: nn.Parameter, host: ParameterHost, dtype: torch.dtype, device: torch.device) -> None:
    """``host`` answers for ``parameter`` from now on, which becomes paged out, with ``dtype``, on ``device``."""
    _hosts[parameter] = weakref.ref(host)
    parameter.data = _placeholder(dtype, device).expand(parameter.shape)
    parameter.__class__ = PagedParameter


def let_go(parameters: Iterable[nn.Parameter]) -> None:
    """The parameters are ordinary again: whatever data they have is theirs."""
    for parameter in parameters:
        _hosts.pop(parameter, None)
        parameter.__class__ = nn.Parameter


def bind(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """``parameter`` computes with ``values`` (same shape and dtype), which it does not own."""
    parameter.__class__ = ResidentParameter
    parameter.data = values


def unbind(parameter: nn.Parameter) -> None:
    """``parameter`` gives up its data; one shared element, expanded, keeps shape, dtype and device."""
    parameter.__class__ = ResidentParameter  # so that the next line is not an operation on a paged-out parameter
    parameter.data = _placeholder(parameter.dtype, parameter.device).expand(parameter.shape)
    parameter.__class__ = PagedParameter


_placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if (dtype, device) not in _placeholders:
        # Not a number, so that whatever gets past all guards cannot pass for a weight.
        filling = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        _placeholders[dtype, device] = torch.full((), filling, dtype=dtype, device=device)
    return _placeholders[dtype, device]


_AUTOGRAD_FIELD: Any = torch.Tensor.grad


def plain_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that autograd put into the parameter, whatever the engine says about it."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _AUTOGRAD_FIELD.__get__(parameter)
    return gradient


def set_plain_grad(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set or clear the gradient that autograd accumulates into."""
    with torch._C.DisableTorchFunctionSubclass():
        _AUTOGRAD_FIELD.__set__(parameter, gradient)
