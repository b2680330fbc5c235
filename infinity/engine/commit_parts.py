"""What a commit of a durable run says besides where bytes lie: the layout that they have, and all that is no tensor of a unit.

Pure data: knows layouts, scalars and generators of random numbers; must not know files or when anything is written.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.numerics.chunk_format import ChunkFormat
from infinity.units.unit import Unit

_MOST_SHOWN = 4


def layout_of(
    units: Sequence[Unit],
    state_names: Mapping[int, Sequence[str]],
    form: ChunkFormat,
    optimizer: str,
    groups: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """What must be the same for a commit to be gone on from, as JSON has it."""
    parameters = {
        slot.spec.fqn: [
            unit.name,
            list(slot.spec.shape),
            list(slot.spec.stride),
            str(slot.spec.dtype),
            slot.spec.is_trainable,
            list(state_names[unit.index]) if slot.spec.is_trainable else [],
        ]
        for unit in units
        for slot in unit.layout.slots
    }
    records = [str(form.weight_dtype), form.main.value, form.states.value]
    return {"parameters": parameters, "records": records, "optimizer": optimizer, "groups": groups}


def check_layout(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """See that a commit is of this model and this optimizer.

    Raises:
        UnsupportedModelError: names what differs.
    """
    old, new = found["parameters"], json.loads(json.dumps(wanted["parameters"]))
    problems = [f"'{fqn}' is missing in it" for fqn in new if fqn not in old]
    problems += [f"'{fqn}' is not in the model" for fqn in old if fqn not in new]
    words = ("unit", "shape", "strides", "dtype", "trainable", "states")
    for fqn in new:
        if fqn in old and old[fqn] != new[fqn]:
            differing = zip(words, old[fqn], new[fqn], strict=True)
            problems += [f"'{fqn}' has {word} {was}, not {now}" for word, was, now in differing if was != now]
    for index, fqns in enumerate(wanted["groups"]):
        before = found.get("groups", wanted["groups"])  # commits of before have none
        here = set(before[index]) if index < len(before) else set()
        problems += [f"'{fqn}' is not in group {index} of its optimizer" for fqn in fqns if fqn not in here]
    if not problems:
        for word, name in (("main weights and states are kept as", "records"), ("the optimizer is", "optimizer")):
            if found[name] != wanted[name]:
                problems.append(f"{word} {found[name]}, not {wanted[name]}")
    if problems:
        more = f" and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise UnsupportedModelError(
            f"the durable run in '{where}' is of another training: {'; '.join(problems[:_MOST_SHOWN])}{more}",
            cure="Make model, optimizer and config as they were, or name another infinity.durable_path",
        )


def header(layout: Mapping[str, Any], step: int, page_bytes: int, places: Mapping[str, Any]) -> bytes:
    """What is looked at first."""
    content = {
        "layout": layout,
        "step": step,
        "time": time.time(),
        "page_bytes": page_bytes,
        "places": places,
    }
    return json.dumps(content).encode()


def pack(rest: Mapping[str, Any]) -> bytes:
    """Scalars and small tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(dict(rest), buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """What `pack` was given. It is unpickled: a run directory is to be trusted like a script."""
    found: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return found


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All buffers by name, also those that a state dict leaves out: each once."""
    return {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}


def set_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Go on from what `buffers_of` gave."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])
