"""Names and layouts of a model's files as transformers writes them: it reverts transformers' weight conversions.

[Note: finding groups] transformers reverts a whole state dict at once, which would need all weights in memory. So it is
first reverted on the meta device, without values. A tensor that comes out as the same object was renamed. The other
tensors are put into groups that are reverted alone, one group in memory at a time: one tensor if that is enough (all
experts' weights, split into one tensor each), otherwise all tensors of a unit that are left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.safetensors_file import Entry
from infinity.device.drive_tensors import large_results_on
from infinity.errors import ModelError

_Dict = dict[str, torch.Tensor]


def original_entries(model: Any, entries: Sequence[Entry], directories: Sequence[Path]) -> list[Entry]:
    """The entries of a model's files, from entries with the model's own names. Same for a model not of transformers.

    Args:
        model: may be on the meta device.
        entries: one name each.
        directories: large results of conversions lie in files in them.

    Raises:
        ModelError: a conversion cannot be reverted group by group.
    """
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # as `save_pretrained` does
    entries = [entry for entry in entries if not left_out.intersection(entry.names)]
    # transformers 5 and later: only there do models convert the weights of their files.
    if not hasattr(model, "_finalize_model_loading"):
        return list(entries)
    sources = {entry.names[0]: entry for entry in entries}
    # A layer of Mixtral, whose model has merged what its files have apart:
    #   put_in:   norm [64], experts.gate_up_proj [8, 2 * 128, 64]
    #   come_out: norm [64] (the same object), experts.0.w1 [128, 64], experts.1.w1, ..., experts.0.w3, ...
    #   renamed = {norm: norm}; made = experts.*; the only group is [experts.gate_up_proj]
    put_in = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in sources.items()}
    come_out = _reverted(model, put_in)
    origins = {id(tensor): name for name, tensor in put_in.items()}
    renamed = {origins[id(tensor)]: name for name, tensor in come_out.items() if id(tensor) in origins}
    made = {name: tensor for name, tensor in come_out.items() if id(tensor) not in origins}
    groups: dict[str, list[Entry]] = {}
    for names in _split([name for name in sources if name not in renamed], sources, made, model, put_in):
        results = {name: made.pop(name) for name in _reverted(model, {name: put_in[name] for name in names})}
        groups[names[0]] = _converted(model, [sources[name] for name in names], results, directories)
    # Something came out of the whole state dict and of no group.
    if made:
        raise _cannot(model, next(iter(made)))
    found: list[Entry] = []
    for name, entry in sources.items():
        if name in renamed:
            found.append(dataclasses.replace(entry, names=(renamed[name], *entry.names[1:])))
        elif name in groups:
            found += groups[name]
    return found


def _reverted(model: Any, state: _Dict) -> _Dict:
    from transformers.core_model_loading import revert_weight_conversion

    found: _Dict = revert_weight_conversion(model, dict(state))
    return found


def _split(
    names: list[str], sources: Mapping[str, Entry], made: _Dict, model: Any, put_in: _Dict
) -> Iterator[list[str]]:
    """Groups of names that are reverted alone. See [Note: finding groups]."""

    def fits(group: list[str]) -> bool:
        try:
            alone = _reverted(model, {name: put_in[name] for name in group})
        except Exception:  # whatever a conversion raises that lacks one of its tensors
            return False
        # A conversion that lacks one of its tensors may not raise, but give other names or shapes: those are no
        # entries.
        return all(name in made and made[name].shape == tensor.shape for name, tensor in alone.items())

    rest: dict[int, list[str]] = {}
    for name in names:
        if fits([name]):
            yield [name]
        else:
            rest.setdefault(id(sources[name].origin), []).append(name)
    for group in rest.values():
        if not fits(group):
            raise _cannot(model, group[0])
        yield group


def _cannot(model: Any, name: str) -> ModelError:
    problem = f"transformers' conversion of '{name}' of {type(model).__name__} cannot be taken back on its own"
    return ModelError(problem, cure="Use engine.save_16bit_model, which writes the model's own names", fqn=name)


def _converted(
    model: Any, sources: Sequence[Entry], results: Mapping[str, torch.Tensor], directories: Sequence[Path]
) -> list[Entry]:
    """Entries of what one group's ``sources`` become when transformers' conversion is reverted.

    All are computed when the first of them is written.
    """
    made: _Dict = {}

    # The value of an `Entry`: a context manager with the tensor to be written.
    @contextlib.contextmanager
    def opened(name: str) -> Iterator[torch.Tensor]:
        if name not in made:
            with contextlib.ExitStack() as stack:
                values = [(entry, stack.enter_context(entry.value()).detach()) for entry in sources]
                with large_results_on(directories):
                    made.update(_reverted(model, {entry.names[0]: value.to(entry.dtype) for entry, value in values}))
        # Each result is written once, and released then.
        yield made.pop(name)

    return [
        Entry((name,), tensor.shape, tensor.dtype, functools.partial(opened, name)) for name, tensor in results.items()
    ]
