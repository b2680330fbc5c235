"""Gives the values of a state dict to whoever keeps the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from infinity.errors import OptimizerNotPageableError
from infinity.optim.executor import hyperparameters, one_element
from infinity.optim.facade.lazy_state import LazyEntry
from infinity.optim.main_weights import PENDING, without_main_weight
from infinity.optim.probe import StateSchema
from infinity.optim.slice_updater import SliceUpdater
from infinity.optim.wrapped_optimizer import WrappedOptimizer


def check_entry(fqn: str, entry: Mapping[str, Any], schema: StateSchema) -> None:
    """Check a parameter's state that was assigned as it is.

    Raises:
        ValueError: something is missing that a step needs, or not stored as what it is.
    """
    names = (*schema.elementwise, *schema.scalars)
    missing = [name for name in names if name not in entry]
    if missing:
        raise ValueError(
            f"the state for '{fqn}' lacks {', '.join(map(repr, missing))}, which the next step needs. Give all of "
            f"{', '.join(map(repr, names))}, or none: then the parameter starts anew"
        )
    for name in schema.elementwise:
        value = entry[name]
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the state '{name}' for '{fqn}' is {kind}. States are float32: give value.float()")


def check_values(fqn: str, shape: Sequence[int], values: Mapping[str, Any], elementwise: Sequence[str]) -> None:
    """Check tensors of a parameter's state.

    Args:
        fqn, shape: the parameter's.
        values: the state.
        elementwise: names of what is kept per element.

    Raises:
        ValueError: one of those has another shape or kind, or another value is a tensor of several elements.
    """
    for name, value in values.items():
        is_tensor = isinstance(value, Tensor)
        found = tuple(value.shape) if is_tensor else type(value).__name__
        what = f"there is a state '{name}' of parameter '{fqn}' with shape {found}"
        if name in elementwise:
            is_number = is_tensor and not value.is_complex() and not value.is_meta
            if found != tuple(shape) or not is_number:
                kind = f" ({value.dtype}, on {value.device})" if is_tensor else ""
                raise ValueError(f"{what}{kind}. Give a floating-point tensor of shape {tuple(shape)}")
        elif is_tensor and value.numel() != 1:
            raise ValueError(
                f"{what}, which the optimizer does not keep here. Give {', '.join(elementwise) or 'none'} per element, and "
                "scalars"
            )


class StateLoader:
    """Checks a state dict against a wrapped optimizer, then loads it parameter by parameter.

    All but the element-wise tensors goes through the optimizer class's own `load_state_dict`, on one-element stand-ins.
    That does what torch does for the class: old layouts, dtypes and devices of step counts, missing group keys.

    Args:
        wrapped_optimizer: groups to load into.
        updater: knows which state there is.
        state_dict: torch's layout. Its state may be lazy.

    Raises:
        ValueError: it does not fit; nothing has been changed.
    """

    def __init__(
        self, wrapped_optimizer: WrappedOptimizer, updater: SliceUpdater, state_dict: Mapping[str, Any]
    ) -> None:
        self._wrapped_optimizer = wrapped_optimizer
        self._updater = updater
        self._tiled = wrapped_optimizer.tiled
        self._executor = wrapped_optimizer.executor()
        self._index_of = {
            id(param): index for index, group in enumerate(wrapped_optimizer.param_groups) for param in group["params"]
        }
        saved_groups: list[dict[str, Any]] = state_dict["param_groups"]
        # All checks before anything is written: a dict that does not fit changes nothing.
        self._groups = self._load_groups(saved_groups)
        for index, group in enumerate(self._groups):
            self._check_names(index, group)
        saved_ids = chain.from_iterable(group["params"] for group in saved_groups)
        states, pending = state_dict["state"], state_dict.get(PENDING, {})
        self._entries: list[tuple[Tensor, Mapping[str, Any], Mapping[str, Any]]] = []
        # torch matches parameters by their order over all groups.
        for param, saved_id in zip(self._tiled.without_tiles([*wrapped_optimizer.params()]), saved_ids, strict=True):
            found, parts = (states.get(saved_id, {}), pending.get(saved_id, {})), self._tiled.of(param)
            if parts is None:
                self._entries.append((param, *found))
            else:
                self._entries += zip(parts.tiles, *(parts.split_entry(_plain(entry)) for entry in found), strict=True)
        for param, lazy, _ in self._entries:
            # Checking a lazy entry would read it from storage once more; it is checked when it is loaded.
            if not isinstance(lazy, LazyEntry) or lazy.is_read:
                entry, main = without_main_weight(lazy)
                self._state(param, entry)
                if main is not None and tuple(main.shape) != tuple(param.shape):
                    raise ValueError(
                        f"loaded state dict has a main weight of parameter '{self._wrapped_optimizer.fqn(param)}' with shape "
                        f"{tuple(main.shape)}, but the parameter has shape {tuple(param.shape)}"
                    )

    def load_into(self, keeper: Any, mains: Any) -> None:
        """Write all states and main weights; then set the hyperparameters in the wrapped optimizer's own dicts.

        Args:
            keeper: replaces states (`PagedOptimizer`).
            mains: replaces main weights; None: the parameters are the main weights.

        Raises:
            ValueError: a parameter has a state in the dict, and no place for it here; nothing has been changed.
        """
        placed = [each for each in self._entries if keeper.has_place(each[0])]
        # Without a place, an entry is an error only if it holds a state, which would be lost.
        for param, entry, _ in self._entries:
            if not keeper.has_place(param) and entry and without_main_weight(_plain(entry))[0]:
                raise ValueError(
                    f"loaded state dict has a state of parameter '{self._wrapped_optimizer.fqn(param)}', which is "
                    "frozen and has no place for it here: it would be lost. Call requires_grad_(True) on it before "
                    "infinity.initialize"
                )
        # One parameter at a time: a lazy entry is read, stored and dropped, so states need not be in memory together.
        for param, lazy, pending in placed:
            entry, main = without_main_weight(_plain(lazy))
            main = without_main_weight(_plain(pending))[1] if main is None else main
            if main is not None and mains is not None:
                mains.load_main_weight(param, main)
            state = self._state(param, entry)
            # Neither a state to write nor one to drop: no place is touched.
            if state or keeper.has_state(param):
                keeper.load_state(param, state)
        for group, loaded in zip(self._wrapped_optimizer.param_groups, self._groups, strict=True):
            params = group["params"]
            # The dict stays the same object: schedulers and the script hold it.
            group.clear()
            group.update({**loaded, "params": params})

    def _load_groups(self, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups as the class would load them, with stand-ins for parameters. Raises torch's errors."""
        device = self._wrapped_optimizer.device
        own = [
            {
                **group,
                "params": [torch.nn.Parameter(one_element(device)) for _ in self._tiled.without_tiles(group["params"])],
            }
            for group in self._wrapped_optimizer.param_groups
        ]
        # torch's own load_state_dict on one-element parameters: its errors, and its rules for missing keys.
        optimizer = self._executor.optimizer
        optimizer.param_groups = own
        optimizer.load_state_dict({"state": {}, "param_groups": saved_groups})
        return optimizer.param_groups

    def _state(self, param: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The entry as the parameter takes it, after checking that it fits."""
        given = {name: value for name, value in entry.items() if value is not None}  # SGD saves momentum_buffer=None
        if not given:
            return {}
        names, fqn = self._updater.state_names(self._index_of[id(param)]), self._wrapped_optimizer.fqn(param)
        missing = [name for name in names if name not in given]
        if missing:
            raise ValueError(
                f"loaded state dict lacks state {', '.join(map(repr, missing))} of parameter '{fqn}'. "
                f"It has {', '.join(map(repr, given))}: perhaps another kind of optimizer saved it"
            )
        check_values(fqn, param.shape, given, names)
        # They are float32, as main weights are; those of an ordinary parameter, which was added later, as in torch.
        is_held = param in self._wrapped_optimizer
        where = (torch.float32,) if is_held else (param.device, param.dtype)
        tensors = {name: given[name].detach().to(*where) for name in names}
        # One element in place of each large tensor: the class converts what is small, and copies nothing large.
        small = {name: one_element() if name in names else value for name, value in given.items()}
        like = one_element(self._wrapped_optimizer.device) if is_held else param.detach()
        loaded = self._scalars(param, small, like)
        return {name: value for name, value in loaded.items() if name not in names} | tensors

    def _scalars(self, param: Tensor, small: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
        """The state as the class loads it."""
        index = self._index_of[id(param)]
        values = {key: value for key, value in self._groups[index].items() if key != "params"}
        try:
            loaded = self._executor.load(values, small, like)
            needed = self._updater.schema_under(hyperparameters(self._wrapped_optimizer.param_groups[index])).scalars
            missing = [name for name in needed if name not in loaded] if param.requires_grad else []
            int(loaded.get("step", 0))  # raises for what is no number
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            missing = [repr(error)]
        if missing:
            raise ValueError(
                f"loaded state dict has no usable scalars for parameter '{self._wrapped_optimizer.fqn(param)}': "
                f"{', '.join(missing)}. Perhaps another kind of optimizer saved it"
            )
        return loaded

    def _check_names(self, index: int, group: Mapping[str, Any]) -> None:
        reserved = self._updater.state_names(index)
        # Hyperparameters of the dict may switch states on or off, and records have the states they were laid out for.
        try:
            needed = self._updater.schema_under(hyperparameters(group)).elementwise
        except OptimizerNotPageableError as error:
            raise ValueError(
                f"{self._wrapped_optimizer.name} cannot run with the hyperparameters in the loaded state dict's group {index}: "
                "perhaps another kind of optimizer saved it"
            ) from error
        if set(needed) != set(reserved):
            raise ValueError(
                f"the hyperparameters in the loaded state dict's group {index} make {self._wrapped_optimizer.name} keep "
                f"{list(needed)} per element, but storage was laid out for {list(reserved)}. "
                "Make the optimizer with the hyperparameters of the saved one"
            )


def _plain(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return entry.gather() if isinstance(entry, LazyEntry) else entry
