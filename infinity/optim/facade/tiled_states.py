"""An optimizer's state dict as it is without tiles, and with them: see `infinity.optim.groups`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, count
from typing import Any

from infinity.optim.facade.lazy_state import DictEntry, LazyEntry
from infinity.optim.groups import TiledParameter
from infinity.optim.main_weights import PENDING
from infinity.optim.template import Template

_STATES = ("state", PENDING)


def without_tiles(found: dict[str, Any], template: Template, clock: Callable[[], object]) -> dict[str, Any]:
    """A state dict that has one entry for each parameter that is tiled. ``clock``: see `LazyEntry`."""
    tiled = template.tiled
    if not tiled.tiled:
        return found
    params = list(template.params())
    old = chain.from_iterable(group["params"] for group in found["param_groups"])
    key_of = {id(param): key for param, key in zip(params, old, strict=True)}
    numbers = count()
    result: dict[str, Any] = {**found, "param_groups": [], **{name: {} for name in _STATES if name in found}}
    for group, saved in zip(template.param_groups, found["param_groups"], strict=True):
        members = tiled.without_tiles(group["params"])
        keys = [next(numbers) for _ in members]
        result["param_groups"].append({**saved, "params": keys})
        for param, key in zip(members, keys, strict=True):
            for name in _STATES:
                entry = _entry_of(param, found.get(name, {}), key_of, template, clock)
                if entry is not None:
                    result[name][key] = entry
    return result


def _entry_of(
    param: Any, states: Mapping[Any, Any], key_of: Mapping[int, Any], template: Template, clock: Callable[[], object]
) -> Any:
    tiled = template.tiled.of(param)
    if tiled is None:
        return states.get(key_of[id(param)])
    keys = [key_of.get(id(tile)) for tile in tiled.tiles]
    if not all(key in states for key in keys):
        return None
    entries = [states[key] for key in keys]
    return DictEntry(lambda: tiled.join_entries([entry.gather() for entry in entries]), clock, tiled.fqn)


def with_tiles(given: Mapping[str, Any], template: Template) -> Mapping[str, Any]:
    """The counterpart: a state dict of a training without tiles, for one with them."""
    tiled = template.tiled
    if not tiled.tiled:
        return given
    numbers = count()
    result: dict[str, Any] = {**given, "param_groups": [], **{name: {} for name in _STATES if name in given}}
    # If there are not as many, torch says so.
    for group, saved in zip(template.param_groups, given["param_groups"], strict=False):
        members = tiled.without_tiles(group["params"])
        if len(members) != len(saved["params"]):
            return given
        keys: list[int] = []
        for param, key in zip(members, saved["params"], strict=True):
            parts = tiled.of(param)
            own = [next(numbers) for _ in range(1 if parts is None else len(parts.tiles))]
            keys += own
            for name in _STATES:
                if key in given.get(name, {}):
                    result[name].update(zip(own, _split(parts, given[name][key]), strict=True))
        result["param_groups"].append({**saved, "params": keys})
    rest = given["param_groups"][len(result["param_groups"]) :]
    result["param_groups"] += rest
    return result


def _split(parts: TiledParameter | None, entry: Mapping[str, Any]) -> Iterator[Any]:
    if parts is None:
        yield entry
    else:
        yield from parts.split_entry(entry.gather() if isinstance(entry, LazyEntry) else entry)
