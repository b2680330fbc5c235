"""DeepSpeed's module ``utils.z3_leaf_module``. Marks are kept, but have no effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take the mark away."""
    model._z3_leaf = flag  # type: ignore[assignment]  # DeepSpeed's name, which scripts look at


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """False: marks have no effect."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked ones in ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark modules by class.

    Args:
        model: where to look.
        leaf_module_classes: classes, or their names, with or without the module that defines them.
        raise_if_not_found: whether there must be one.

    Returns:
        The modules of these classes and of classes derived from them.

    Raises:
        ValueError: there is none.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks away; as `set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in ``model.named_modules()``.

    Returns:
        The modules, and the names that the model does not have.

    Raises:
        ValueError: the model does not have a name, and ``raise_if_not_found`` is true.
    """
    return _mark_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As `set_z3_leaf_modules_by_name`, by the ends of names."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _mark(model: nn.Module, classes: Sequence[Any], flag: bool, raise_if_not_found: bool) -> list[nn.Module]:
    kinds = tuple(each for each in classes if isinstance(each, type))
    names = {each for each in classes if isinstance(each, str)}
    found = [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        or names & {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
    ]
    if raise_if_not_found and not found:
        raise ValueError(f"the model has no module of {list(classes)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _mark_named(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], Any], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    # `fits(name, each)`: `str.__eq__` for names, `str.endswith` for suffixes.
    named = dict(model.named_modules())
    found = {name: module for each in wanted for name, module in named.items() if fits(name, each)}
    missing = [each for each in wanted if not any(fits(name, each) for name in named)]
    if missing and raise_if_not_found:
        raise ValueError(f"the model has no module with the names {missing}")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing
