"""What an optimizer class of the user's may look at besides its groups and states: attributes, its own and the parameters'.

Updates run on pieces of parameters, in a copy of the optimizer that was made in `initialize`. Neither sees such attributes.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from infinity.errors import OptimizerNotPageableError
from infinity.optim.probe import copy_scalar

_OF_TORCH = frozenset(
    {
        "_opt_called",
        "_step_count",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_need_device_dtype_check_for_fused",
        "_step_supports_amp_scaling",
    }
)
"""Private ones that torch sets, and that no update goes by."""
_OTHERWISE_KNOWN = frozenset({"state", "param_groups", "defaults", "step", "zero_grad"}) | _OF_TORCH


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's own attributes, as far as its class gave it any that a step may look at. Tensors are copied."""
    return {name: copy_scalar(vars(optimizer)[name]) for name in attribute_names(optimizer)}


def attribute_names(optimizer: Optimizer) -> list[str]:
    """Names of `attributes_of`: private ones as far as the code of a class that is not torch's has them."""
    return [
        name
        for name in vars(optimizer)
        if name not in _OTHERWISE_KNOWN
        and (not name.startswith("_") or (name in _names_in(type(optimizer)) and not name.endswith("_hooks")))
    ]


def is_of_the_class(optimizer: Optimizer, name: str) -> bool:
    """Whether ``name`` is a value that a class which is not torch's has for all its instances."""
    found = inspect.getattr_static(type(optimizer), name, None)
    own = [base for base in type(optimizer).__mro__ if not base.__module__.startswith("torch.")]
    return any(name in vars(base) for base in own) and not callable(found) and not hasattr(found, "__get__")


def refuse_attributes_of_parameters(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Refuse a class whose code names an attribute that somebody has set on a parameter, or that keeps values by parameter.

    Raises:
        OptimizerNotPageableError: which one.
    """
    params = list(params)
    identities = {id(param) for param in params}
    for name, value in vars(optimizer).items():
        keys = value if name not in _OTHERWISE_KNOWN and isinstance(value, Mapping | Set) else ()
        if any(id(key) in identities or (isinstance(key, int) and key in identities) for key in keys):
            raise OptimizerNotPageableError(
                type(optimizer).__name__,
                f"its attribute '{name}' is looked up by parameters, and the pieces that it updates are others",
                cure="Put parameters that are treated alike into a group of their own, with an entry that says how; what "
                "has a value for each element can be done to gradients before the step",
            )
    given = {name for param in params for name in getattr(param, "__dict__", {})}
    found = sorted(given & _names_in(type(optimizer))) if given else []
    if found:
        raise OptimizerNotPageableError(
            type(optimizer).__name__,
            f"it looks at the attribute '{found[0]}' of parameters, which the pieces that it updates do not have",
            cure="Put those parameters into a group of their own, with an entry that says the same",
        )


def _names_in(cls: type[Optimizer]) -> set[str]:
    """Names and texts in the code of a class, and in functions of its module that it calls."""
    if cls in _known_names:
        return _known_names[cls]
    rest: list[types.CodeType] = []
    seen: set[types.CodeType] = set()
    modules: list[dict[str, Any]] = []
    for base in cls.__mro__:
        if base is object or base.__module__.startswith("torch."):
            continue
        for member in vars(base).values():
            function = inspect.unwrap(member)  # of torch's hooks for steps, and of what decorates it (no_grad)
            if isinstance(function, types.FunctionType):
                rest.append(function.__code__)
                modules.append(function.__globals__)
    names: set[str] = set()
    while rest:
        code = rest.pop()
        if code in seen:
            continue
        seen.add(code)
        names.update(code.co_names)
        names.update(constant for constant in code.co_consts if isinstance(constant, str))
        rest += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            for module in modules:
                function = module.get(name)
                if isinstance(function, types.FunctionType) and function.__module__ == module.get("__name__"):
                    rest.append(function.__code__)
    _known_names[cls] = names
    return names


_known_names: weakref.WeakKeyDictionary[type[Optimizer], set[str]] = weakref.WeakKeyDictionary()
