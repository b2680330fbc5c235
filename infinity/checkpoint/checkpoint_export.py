"""Exports a checkpoint's weights as safetensors, tensor by tensor, without an engine and without memory for a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.checkpoint_loading import other_shapes
from infinity.checkpoint.original_names import original_entries
from infinity.checkpoint.safetensors_export import as_storage_error, save_configs, write_shards
from infinity.checkpoint.safetensors_file import Entry
from infinity.checkpoint.saved import Checkpoint, SavedTensor
from infinity.device.drive_tensors import DriveTensors
from infinity.errors import CheckpointError, ModelError, listed
from infinity.units.unit import is_float8
from swapper.volumes.publish import Staging


class CheckpointExport:
    """One export of a checkpoint. The constructor plans and checks it, `write` writes it.

    Attributes:
        num_bytes: of all tensors.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Path,
        *,
        dtype: torch.dtype | None = None,
        config_from: Path | None = None,
    ) -> None:
        """
        Args:
            checkpoint: it has fp32 main weights of trained parameters, and frozen ones in their own dtype.
            directory: the files appear in it.
            dtype: of all floating-point parameters, rounded to nearest; None: as the checkpoint has them.
            config_from: a directory with the config of a Hugging Face model. Files then have names and layouts of that
                model's files, and its configs. None: the model's own names, and no config.

        Raises:
            CheckpointError: it is damaged, or of another model than the config says; the message names tensors.
            ModelError: there is no such model, or safetensors does not support a tensor.
        """
        checkpoint.verify_small_files()
        self._directory = directory
        self._dtype = dtype
        nothing: tuple[Any, Any] = (None, None)
        self._model, self._generation = _model_of(config_from) if config_from is not None else nothing
        parameters = checkpoint.of("parameters")
        if left_out := checkpoint.beside.excluded:
            raise CheckpointError(
                checkpoint.folder,
                "it was saved with exclude_frozen_parameters=True or infinity.frozen_dtype, "
                f"without '{left_out[0]}' and {len(left_out) - 1} others",
                cure="Load it into the model with its base, and call engine.save_pretrained",
            )
        buffers = checkpoint.of("buffers")
        names = {fqn: [fqn] for fqn in (*parameters, *buffers)}
        if self._model is not None:
            names |= {fqn: [name] for fqn, name in _checked(checkpoint, self._model, parameters).items()}
        else:
            # Without the model's class, nothing ties weights after a load. So each tied weight is written under all of
            # its names: a strict load_state_dict finds them.
            further = {
                fqn: first for fqn, first in checkpoint.beside.tied.items() if first in names and fqn not in names
            }
            for fqn, first in further.items():
                names[first].append(fqn)
        entries = [self._entry(names[fqn], saved, is_cast=True) for fqn, saved in parameters.items()]
        entries += [self._entry(names[fqn], saved, is_cast=False) for fqn, saved in buffers.items()]
        self._entries = original_entries(self._model, entries, [directory])
        self.num_bytes = sum(entry.file_bytes for entry in self._entries)

    def write(self, max_shard_bytes: int, note: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write the files. All appear at once, when they are complete and on the drive.

        Args:
            max_shard_bytes: of a file, if it has more than one tensor.
            note: gets the number of bytes that were written since its last call.

        Raises:
            CheckpointError: something in the checkpoint is damaged; nothing has changed in the directory.
            StorageError: the directory cannot take it; what was there before is still there.
        """
        with as_storage_error(self._directory, self.num_bytes):
            write_shards(self._entries, self._directory, "model", self._configs, max_shard_bytes, note)

    def _configs(self, staging: Staging) -> Sequence[str]:
        dtypes = (entry.dtype for entry in self._entries if entry.dtype.is_floating_point)
        return save_configs(
            self._model, staging, dtype=self._dtype or next(dtypes, torch.float32), generation=self._generation
        )

    def _entry(self, names: Sequence[str], saved: SavedTensor, *, is_cast: bool) -> Entry:
        def parts() -> Iterator[torch.Tensor]:
            return (part for _, part in saved.parts())

        def value() -> contextlib.nullcontext[torch.Tensor]:
            # Only a conversion of transformers asks for the whole tensor. It may not fit into memory, so it lies in a
            # nameless file beside the export.
            into = DriveTensors([self._directory]).empty(saved.shape, saved.dtype)
            return contextlib.nullcontext(saved.read(into=into))

        # A float8 tensor has its scales in another one: a cast alone would give wrong values. Buffers keep their dtype.
        is_cast = is_cast and saved.dtype.is_floating_point and not is_float8(saved.dtype)
        dtype = self._dtype if self._dtype is not None and is_cast else saved.dtype
        return Entry(names, saved.shape, dtype, value, parts)


def _model_of(directory: Path) -> tuple[Any, Any]:
    """A Hugging Face model on the meta device, and its generation config if there is one."""
    import transformers

    if not (directory / "config.json").is_file():
        raise ModelError(
            f"'{directory}' has no config.json", cure="Name the directory of the Hugging Face model that was trained"
        )
    config = transformers.AutoConfig.from_pretrained(directory)
    name = next(iter(getattr(config, "architectures", None) or []), None)
    model_class: Any = getattr(transformers, name, None) if name is not None else None
    if model_class is None:
        raise ModelError(
            f"the config in '{directory}' names the class {name!r}, which transformers does not have",
            cure="Set 'architectures' in it, as save_pretrained does",
        )
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
    problems += [
        f"'{name}' is missing" for name, _ in model.named_parameters() if name not in {*saved, *names.values()}
    ]
    if problems:
        raise CheckpointError(
            checkpoint.folder,
            f"it is not of the model that the config describes ({type(model).__name__}): {listed(problems, '; ')}",
            cure="Name the config of the model that was trained",
        )
    return names
