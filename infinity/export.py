"""Writes the trained weights as safetensors, unit by unit."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from infinity.holding import ModelHolding
from infinity.pager import Pager


def save_safetensors(holding: ModelHolding, pager: Pager, directory: Path, filename: str) -> None:
    """One shard per unit plus one for buffers, and an index, each moved into place when it is whole.

    Other files of that name in the directory, those of an earlier save, are removed then.
    Tied weights are written under each of their names, so that a strict ``load_state_dict`` finds them all.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem = filename.removesuffix(".safetensors")
    names: dict[int, list[str]] = {}
    for fqn, parameter in holding.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    buffers = _persistent_buffers(holding.model)
    num_shards = len(holding.units) + bool(buffers)
    index: dict[str, str] = {}
    total_bytes = 0

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total_bytes
        shard = f"{stem}-{number:05d}-of-{num_shards:05d}.safetensors"
        partial = directory / f".{shard}.partial"
        try:
            save_file(tensors, partial, metadata={"format": "pt"})
            partial.replace(directory / shard)
        finally:
            partial.unlink(missing_ok=True)
        index.update(dict.fromkeys(tensors, shard))
        total_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    for number, unit in enumerate(holding.units, start=1):
        tensors: dict[str, torch.Tensor] = {}
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            value = pager.copy_of(unit, slot).cpu().contiguous()
            aliases = names[id(parameter)]
            tensors.update({name: value if name == aliases[0] else value.clone() for name in aliases})
        write(number, tensors)
    if buffers:
        write(num_shards, buffers)
    contents = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(index.items()))}
    _replace(directory / f"{stem}.safetensors.index.json", json.dumps(contents, indent=2) + "\n")
    # Older weights of that name: a reader would take a single file before an index.
    for path in (directory / f"{stem}.safetensors", *directory.glob(f"{glob.escape(stem)}-*-of-*.safetensors")):
        if path.name not in index.values():
            path.unlink(missing_ok=True)
    _save_configs(holding.model, directory)


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer.detach().cpu().clone().contiguous()
    return found


def _save_configs(model: Any, directory: Path) -> None:
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        if config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(directory)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
