"""Exports a checkpoint's weights as safetensors, tensor by tensor, without an engine and without memory for a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.arrays import as_storage_error
from infinity.checkpoint.checkpoint_loading import other_shapes
from infinity.checkpoint.original_names import original_entries
from infinity.checkpoint.safetensors_export import save_configs, write_shards
from infinity.checkpoint.safetensors_file import Entry
from infinity.checkpoint.saved import Checkpoint, SavedTensor
from infinity.device.drive_tensors import DriveTensors
from infinity.errors import CheckpointError, ModelError, listed
from infinity.metrics.progress import progress
from infinity.units.unit import cast_dtype


def export_checkpoint(
    checkpoint: Checkpoint,
    directory: Path,
    max_shard_bytes: int,
    *,
    dtype: torch.dtype | None = None,
    config_from: Path | None = None,
    shows_progress: bool = False,
) -> int:
    """Write a checkpoint's weights. All files appear at once, when they are complete and on the drive.

    Args:
        checkpoint: it has fp32 main weights of trained parameters, and frozen ones in their own dtype.
        directory: the files appear in it.
        max_shard_bytes: of a file, if it has more than one tensor.
        dtype: of all floating-point parameters, rounded to nearest; None: as the checkpoint has them.
        config_from: a directory with the config of a Hugging Face model. Files then have names and layouts of that
            model's files, and its configs. None: the model's own names, and no config.
        shows_progress: on the terminal.

    Returns:
        The bytes of all tensors.

    Raises:
        CheckpointError: it is damaged, or of another model than the config says; the message names tensors. Nothing has
            changed in the directory.
        ModelError: there is no such model, or safetensors does not support a tensor.
        StorageError: the directory cannot take it; what was there before is still there.
    """
    checkpoint.verify_small_files()
    nothing: tuple[Any, Any] = (None, None)
    model, generation = _model_of(config_from) if config_from is not None else nothing
    parameters, buffers = checkpoint.of("parameters"), checkpoint.of("buffers")
    if left_out := checkpoint.beside.excluded:
        raise CheckpointError(
            checkpoint.folder,
            "it was saved with exclude_frozen_parameters=True or infinity.frozen_dtype, "
            f"without '{left_out[0]}' and {len(left_out) - 1} others",
            cure="Load it into the model with its base, and call engine.save_pretrained",
        )
    names = {fqn: [fqn] for fqn in (*parameters, *buffers)}
    if model is not None:
        names |= {fqn: [name] for fqn, name in _checked(checkpoint, model, parameters).items()}
    else:
        # Without the model's class, nothing ties weights after a load. So each tied weight is written under all of its
        # names: a strict load_state_dict finds them.
        further = {fqn: first for fqn, first in checkpoint.beside.tied.items() if first in names and fqn not in names}
        for fqn, first in further.items():
            names[first].append(fqn)
    # Buffers keep their dtype.
    entries = [_entry(names[fqn], each, directory, cast_dtype(each.dtype, dtype)) for fqn, each in parameters.items()]
    entries += [_entry(names[fqn], saved, directory, saved.dtype) for fqn, saved in buffers.items()]
    entries = original_entries(model, entries, [directory])
    num_bytes = sum(entry.file_bytes for entry in entries)
    dtypes = (entry.dtype for entry in entries if entry.dtype.is_floating_point)
    configs = functools.partial(save_configs, model, dtype=dtype or next(dtypes, torch.float32), generation=generation)
    storing = as_storage_error(directory, num_bytes, "the weights")
    with storing, progress("export", num_bytes, is_shown=shows_progress) as note:
        write_shards(entries, directory, "model", configs, max_shard_bytes, note)
    return num_bytes


def _entry(names: Sequence[str], saved: SavedTensor, directory: Path, dtype: torch.dtype) -> Entry:
    def parts() -> Iterator[torch.Tensor]:
        return (part for _, part in saved.parts())

    def value() -> contextlib.nullcontext[torch.Tensor]:
        # Only a conversion of transformers asks for the whole tensor. It may not fit into memory, so it lies in a
        # nameless file beside the export.
        return contextlib.nullcontext(saved.read(into=DriveTensors([directory]).empty(saved.shape, saved.dtype)))

    return Entry(names, saved.shape, dtype, value, parts)


def _model_of(directory: Path) -> tuple[Any, Any]:
    """A Hugging Face model on the meta device, and its generation config if there is one."""
    import transformers

    if not (directory / "config.json").is_file():
        cure = "Name the directory of the Hugging Face model that was trained"
        raise ModelError(f"'{directory}' has no config.json", cure=cure)
    config = transformers.AutoConfig.from_pretrained(directory)
    name = next(iter(getattr(config, "architectures", None) or []), None)
    model_class: Any = getattr(transformers, name, None) if name is not None else None
    if model_class is None:
        problem = f"the config in '{directory}' names the class {name!r}, which transformers does not have"
        raise ModelError(problem, cure="Set 'architectures' in it, as save_pretrained does")
    with torch.device("meta"):
        model = model_class(config)  # shapes and names only, no memory
    has_generation = (directory / "generation_config.json").is_file()
    return model, transformers.GenerationConfig.from_pretrained(directory) if has_generation else None


def _checked(checkpoint: Checkpoint, model: Any, saved: Mapping[str, SavedTensor]) -> dict[str, str]:
    """FQN in the checkpoint -> the model's name for it. Raises CheckpointError if names or shapes differ."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    # transformers maps each tied name to the one whose weight its files have ("lm_head.weight" ->
    # "model.embed_tokens.weight"). The checkpoint may have either, whichever the model listed first when it was saved.
    names = {fqn: tied[fqn] if fqn in tied and tied[fqn] not in saved else fqn for fqn in saved}
    problems = [f"'{fqn}' is not in the model" for fqn in saved if fqn not in shapes]
    problems += other_shapes(saved, shapes)
    known = {*saved, *names.values()}
    problems += [f"'{name}' is missing" for name, _ in model.named_parameters() if name not in known]
    if problems:
        problem = f"it is not of the model that the config describes ({type(model).__name__}): {listed(problems, '; ')}"
        raise CheckpointError(checkpoint.folder, problem, cure="Name the config of the model that was trained")
    return names
