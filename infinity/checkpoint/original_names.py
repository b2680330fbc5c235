"""Names and layouts of a model's files, as transformers itself would write them: its conversions, taken back.

Knows what transformers' ``save_pretrained`` does to a state dict; must not know where values come from.

[Note: finding groups] transformers takes back a whole state dict at once. On the meta device that costs nothing, and it
tells what comes out: what is the very tensor that was put in was only renamed. Of the others it is tried which come out of
one tensor alone (an expert's weights out of all experts'), and what then is left goes together, unit by unit.
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
    """What is to be written in place of a model's own tensors, in their order; the same for a model not of transformers.

    Args:
        model: whose names the entries have; its parameters may be anywhere.
        entries: one name each.
        directories: where large tensors lie that conversions make.

    Raises:
        ModelError: its conversions cannot be taken back.
    """
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    entries = [entry for entry in entries if not left_out.intersection(entry.names)]
    if not hasattr(model, "_finalize_model_loading"):
        return list(entries)
    sources = {entry.names[0]: entry for entry in entries}
    put_in = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in sources.items()}
    come_out = _reverted(model, put_in)
    origins = {id(tensor): name for name, tensor in put_in.items()}
    renamed: dict[str, str] = {}
    made = {name: tensor for name, tensor in come_out.items() if id(tensor) not in origins}
    for name, tensor in come_out.items():
        if id(tensor) in origins:
            renamed[origins[id(tensor)]] = name
    groups: dict[str, list[Entry]] = {}
    for names in _split([name for name in sources if name not in renamed], sources, made, model, put_in):
        results = {name: made.pop(name) for name in _reverted(model, {name: put_in[name] for name in names})}
        groups[names[0]] = _converted(model, [sources[name] for name in names], results, directories)
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
    """See [Note: finding groups]."""

    def fits(group: list[str]) -> bool:
        try:
            alone = _reverted(model, {name: put_in[name] for name in group})
        except Exception:  # whatever a conversion says when something that belongs to it is not there
            return False
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
    return ModelError(
        f"transformers' conversion of '{name}' of {type(model).__name__} cannot be taken back on its own",
        cure="Use engine.save_16bit_model, which writes the model's own names",
        fqn=name,
    )


def _converted(
    model: Any, sources: Sequence[Entry], results: Mapping[str, torch.Tensor], directories: Sequence[Path]
) -> list[Entry]:
    """What comes out of tensors that are converted together: all of it when the first one is written."""
    made: _Dict = {}

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[torch.Tensor]:
        if name not in made:
            made.update(_convert(model, sources, directories))
        yield made.pop(name)

    return [
        Entry((name,), tensor.shape, tensor.dtype, functools.partial(opened, name)) for name, tensor in results.items()
    ]


def _convert(model: Any, sources: Sequence[Entry], directories: Sequence[Path]) -> _Dict:
    with contextlib.ExitStack() as stack:
        values = [(entry, stack.enter_context(entry.value()).detach()) for entry in sources]
        with large_results_on(directories):
            return _reverted(model, {entry.names[0]: value.to(entry.dtype) for entry, value in values})
