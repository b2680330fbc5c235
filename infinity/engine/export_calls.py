"""What an engine exports: its weights in files that transformers and plain torch read, without the engine's states."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

from infinity.checkpoint.safetensors_export import Weights, save_pretrained, save_units
from infinity.config.schema.quantities import parse_bytes
from infinity.distributed.part_folders import check_apart
from infinity.engine.loop_settings import LoopSettings
from infinity.threads.engine_lock import locked
from infinity.units.adapters import is_adapted

logger = logging.getLogger(__name__)


class ExportCalls(LoopSettings):
    """Part of the engine: exports.

    Each method makes the directory if it is missing. If process or machine goes down, the directory holds the old
    weights or the new ones, whole. Of a PEFT model, only adapters are written, as PEFT does it. With several processes,
    rank 0 writes. The others return before it is done, or, if they have shards of what it writes, when it is. If
    processes have different parts of the model, the first process of each part writes, to a directory of its own.
    """

    _has_warned_of_adapters = False

    @locked
    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: int | str = "5GB",
    ) -> bool:
        """Write the trained weights (compute dtype) and buffers as safetensors, in bounded memory; returns True.

        The directory gets ``model.safetensors``, or shards and ``model.safetensors.index.json``, and a Hugging Face model's
        config: ``from_pretrained(save_dir)`` loads it. Names of tensors are the model's own. Of a PEFT model only the
        adapters are written, in PEFT's files.

        Args:
            save_dir: where to.
            save_filename: of one file, from which shards get theirs; "pytorch_model.bin" means the default.
            exclude_frozen_parameters: leave out what does not require a gradient.
            max_shard_size: bytes of a file, or a text ("5GB" is 5e9). A larger tensor has a file of its own.

        Raises:
            CheckpointError: a load has failed midway, so that weights are of two trainings.
            StorageError: the directory cannot be written. Earlier files are still there.
            ModelError: the format has no name or dtype for something; nothing has been written.
            ValueError: ``save_dir`` is empty, or an address ("s3://..."); or ``max_shard_size`` is no size.
        """
        check_directory(save_dir)
        max_shard_bytes = _shard_bytes(max_shard_size)
        self._guard.check_loaded()
        self.flush()
        check_apart(self._mesh, Path(save_dir))

        def save() -> None:
            save_units(
                self._weights(),
                Path(save_dir),
                save_filename,
                trained_only=exclude_frozen_parameters,
                max_shard_bytes=max_shard_bytes,
            )

        self._export("engine.save_16bit_model", save, needs_all=self._parts.exchange.is_divided)
        if self._mesh.data.index > 0:
            return True
        if is_adapted(self.module) and not self._has_warned_of_adapters:
            self._has_warned_of_adapters = True
            logger.warning(
                "engine.save_16bit_model: '%s' got the adapters alone, in PEFT's files, and not the base model. For the whole "
                "model, close the engine and save what merge_and_unload() returns",
                save_dir,
            )
        self._num_saved_steps = self.global_steps
        return True

    def save_pretrained(
        self,
        save_directory: str | Path,
        max_shard_size: int | str = "50GB",
        *,
        safe_serialization: bool = True,
        is_main_process: bool = True,
        push_to_hub: bool = False,
    ) -> None:
        """Write the weights (compute dtype) as transformers' ``model.save_pretrained`` does, in bounded memory.

        The same files with the same names of tensors, so that conversions of names and layouts are taken back: configs,
        and ``model.safetensors``, or shards and an index.

        Args:
            save_directory: where to.
            max_shard_size: bytes of a file, or a text ("5GB" is 5e9). A larger tensor has a file of its own.
            safe_serialization: True: the files are safetensors.
            is_main_process: without effect: every process calls this, and one of them writes.
            push_to_hub: False: nothing is sent anywhere.

        Raises:
            CheckpointError: a load has failed midway, so that weights are of two trainings.
            StorageError: the directory cannot be written. Earlier files are still there.
            ModelError: something cannot be written so that it can be read; nothing has been written.
            ValueError: ``save_directory`` is empty, or an address; or ``max_shard_size`` is no size; or pickles or an upload
                are asked for.
        """
        if not safe_serialization:
            raise ValueError(
                "safe_serialization=False: pickles are not written. engine.save_16bit_model writes one file"
            )
        if push_to_hub:
            raise ValueError(
                "push_to_hub=True: nothing is sent. Afterwards: huggingface_hub.upload_folder(folder_path=...)"
            )
        self._save_pretrained(save_directory, max_shard_size, None)

    def save_fp32_model(self, save_directory: str | Path, max_shard_size: int | str = "50GB") -> None:
        """Write the fp32 main weights as `save_pretrained` writes model weights; what is frozen is cast to fp32.

        Raises:
            CheckpointError, StorageError, ModelError: as `save_pretrained`.
        """
        self._save_pretrained(save_directory, max_shard_size, torch.float32)

    def _save_pretrained(self, directory: str | Path, max_shard_size: int | str, dtype: torch.dtype | None) -> None:
        check_directory(directory)
        max_shard_bytes = _shard_bytes(max_shard_size)
        self._guard.check_loaded()
        self.flush()
        check_apart(self._mesh, Path(directory))
        # Main weights of divided states, and in stage 3 model weights, need every rank's shard.
        needs_all = self._parts.exchange.is_divided or (dtype is not None and self._parts.access.is_divided)

        def save() -> None:
            save_pretrained(self._weights(), Path(directory), max_shard_bytes=max_shard_bytes, dtype=dtype)

        self._export("exporting weights", save, needs_all=needs_all)
        self._num_saved_steps = self.global_steps

    def _export(self, what: str, save: Callable[[], None], *, needs_all: bool) -> None:
        """Save on the first rank. ``needs_all``: the others have shards of what is saved."""
        shared = self._parts.access.shared
        if needs_all and shared is not None:
            shared.run(what, save)
        elif self._mesh.data.index == 0:
            save()

    def _weights(self) -> Weights:
        parts = self._parts
        return Weights(
            parts.parameter_map,
            parts.coordinator,
            parts.access.main_weights,
            self.config.nvme_paths,
            self.config.infinity.progress_bars,
        )


def _shard_bytes(max_shard_size: int | str) -> int:
    try:
        return parse_bytes(max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size {error}, got {max_shard_size!r}") from None


def check_directory(directory: str | Path | None) -> None:
    """Refuse an empty directory, or the address of a store, for which a local directory of that name would be made.

    Raises:
        ValueError: it is one of these.
    """
    if not directory or not os.fspath(directory):  # None, as well
        raise ValueError('the directory is empty. Pass one; "." is the current one')
    # Path("s3://bucket") becomes "s3:/bucket", hence one slash in the pattern.
    if re.match(r"[a-z][a-z0-9]+:/", os.fspath(directory)):
        raise ValueError(
            f"'{directory}' is an address, and no directory. Pass one, and copy from or to the store yourself"
        )
