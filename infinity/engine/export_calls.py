"""What an engine gives others: weights in files or one after the other, and its memory while another engine generates.

[Note: weights at the end]
After a ``with engine:`` block you expect a model with its weights. So the weights are copied back into the model, which
is an ordinary one again, if there is room for them. If there is no room, and nobody has saved them, a warning says so.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from infinity.checkpoint.part_folders import check_apart
from infinity.checkpoint.safetensors_export import Weights, all_entries, save_weights
from infinity.checkpoint.safetensors_file import Entry
from infinity.config.schema.quantities import parse_bytes
from infinity.device.host_memory import free_bytes
from infinity.engine.checkpoint_calls import CheckpointCalls, check_directory
from infinity.errors import StepError, format_bytes
from infinity.loop.phase import Phase
from infinity.threads.engine_lock import locked
from infinity.units.adapters import is_adapted
from swapper import AlignedRegion
from swapper.sync.interrupts import uninterrupted

logger = logging.getLogger(__name__)
_SHARE = 2
"""Weights are restored unasked if they take at most 1 / `_SHARE` of the free memory: the script needs some, too."""


class ExportCalls(CheckpointCalls):
    """Part of the engine: exports.

    Each method that saves makes the directory if it is missing. If process or machine goes down, the directory holds the
    old weights or the new ones, whole. Of a PEFT model, only adapters are written, as PEFT does it. With several processes,
    rank 0 writes. The others return before it is done, or, if they have shards of what it writes, when it is. If
    processes have different parts of the model, the first process of each part writes, to a directory of its own.
    """

    _has_warned_of_adapters = False

    # ---------------------------------------------------------------------------------- beside an engine that generates

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called, and `wake` was not."""
        return self._guard.phase is Phase.ASLEEP

    @locked
    def sleep(self) -> None:
        """Release the engine's memory until `wake`, between two steps, so that another engine can generate meanwhile.

        Pending updates and writes are finished first. Then these are released:

        - on a GPU: all weights, and optimizer states that rest there; torch's cached memory as well;
        - on the host: flat buffers, staging buffers, pinned memory, and memory for gradients.

        What rests in memory only is copied first: to a file beside the states where an offload block names a drive, else
        from the GPU to host memory. These stay: without such a drive, weights and states that rest in host memory; units
        and records below 1 MiB; shards in host memory (stage 3 with ``offload_param`` "cpu"); buffers of the model;
        parameters that the engine does not hold; a weight of which your code holds a tensor; activations of a graph
        that you hold; what threads keep for requests that are not aligned (a few MB).

        Until `wake`, whatever uses the model, its weights or the optimizer raises an error that names `wake`. `iter_weights`
        and `close` work. A second call does nothing. Where several processes train together, all of them call this.

        Raises:
            StepError: gradients wait for a step, or weights are in use or gathered.
            CheckpointError, StorageError: what ``save_checkpoint(blocking=False)`` wrote has failed.
        """
        self._guard.check_open()
        if self.is_asleep:
            return
        self._check_may_step("engine.sleep()")
        parts = self._parts
        if parts.coordinator.is_computing:
            cure = "Call it after the step, outside forward and backward"
            raise StepError.order("engine.sleep()", "the model is computing", cure=cure)
        parts.backwards.deliver_pending()
        self._guard.check_sleep()
        self.wait_for_checkpoint()
        self.flush()
        before = AlignedRegion.mapped_bytes()
        try:
            with uninterrupted():
                parts.coordinator.parameter_cache.page_out_all(parts.coordinator.copies.put_aside)
                parts.stepper.gradients.release_memory()
                parts.storage.release_memory(parts.coordinator.copies.put_aside)
                self._guard.move_to(Phase.ASLEEP)
        except BaseException:
            self._take_memory_back()
            raise
        after = AlignedRegion.mapped_bytes()
        logger.info("asleep: host buffers shrank from %s to %s", format_bytes(before), format_bytes(after))

    @locked
    def wake(self) -> None:
        """Allocate the memory that `sleep` released. Training goes on with the same bits. Does nothing if awake.

        If the memory is not there, what torch or the system raises comes through, and the engine stays asleep.
        """
        self._guard.check_open()
        if self.is_asleep:
            with uninterrupted():
                self._take_memory_back()
                self._guard.move_to(Phase.READY)
                self._parts.reporter.begin_anew()

    def _take_memory_back(self) -> None:
        self._parts.storage.take_memory_back()
        self._parts.coordinator.parameter_cache.page_in_residents()

    @locked
    def iter_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of all weights, unit by unit, as ``load_weights`` of an inference engine takes them.

        Parameters and persistent buffers, with the names of ``module.state_dict()``. Tied weights come once, under the name
        that transformers saves, else the first one. Each tensor is a copy on the compute device, and yours. The engine reads
        one unit at a time within its budget, awake or asleep; asleep it releases each unit again.

        Call it between two steps. Where processes divide weights (stage 3), all of them call it, read it to the end, and get
        all weights; of a model that the script has divided, each gets its part.

        Args:
            dtype: of the tensors that have the compute dtype; None: as they are. They are casts of the model weights: fp32
                main weights are what `save_fp32_model` writes.

        Raises:
            StepError: a step was made since the first tensor, or updates in backward wait for `step`.
            CheckpointError: a load has failed midway, so that weights are of two trainings.
            ModelError: a buffer is sparse, quantized or on the meta device.
        """
        self._guard.check_open()
        self._guard.check_loaded()
        if not self.is_asleep:
            self.flush()
        return self._each_weight(all_entries(self._weights()), dtype)

    def _each_weight(self, entries: Sequence[Entry], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        began = self._parts, self.global_steps
        for entry, following in itertools.zip_longest(entries, entries[1:]):
            with self._parts.coordinator.lock.held("engine.iter_weights()"):
                self._guard.check_open()
                self._guard.check_consistent()
                if began != (self._parts, self.global_steps):
                    cure = "Call engine.iter_weights() again, and read it to the end before the next step"
                    raise StepError.order("engine.iter_weights()", "a step was made since the first tensor", cure=cure)
                is_last = following is None or following.origin is not entry.origin
                copy = self._copy_for_iteration(entry, dtype, is_last=is_last)
            yield entry.names[0], copy  # without the lock: whoever gets it may use the engine

    def _copy_for_iteration(self, entry: Entry, dtype: torch.dtype | None, *, is_last: bool) -> torch.Tensor:
        """``is_last``: no more tensors of its unit are needed."""
        parts = self._parts
        if self.is_asleep:  # then the engine has released its upload buffers
            parts.storage.take_upload_buffers_back()
        with entry.value() as value:
            is_cast = dtype is not None and value.dtype == self.config.compute_dtype
            copy = value.detach().to(self.device, dtype if is_cast else value.dtype, copy=True)
            del value
        if self.is_asleep and is_last:
            parts.coordinator.parameter_cache.page_out_all(parts.coordinator.copies.put_aside)
            parts.storage.release_uploads()
        return copy

    # ------------------------------------------------------------------------------------------------------------- files

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
            ValueError: ``save_dir`` is empty, or an address ("s3://..."); ``save_filename`` is not a file's name; or
                ``max_shard_size`` is no size.
        """

        save_filename = str(save_filename or "model.safetensors")
        if Path(save_filename).name != save_filename or save_filename == "..":  # it would lead out of `save_dir`
            raise ValueError(f"save_filename must be the name of a file in save_dir, not {save_filename!r}")
        what, trained_only = "engine.save_16bit_model", exclude_frozen_parameters
        self._write(what, save_dir, max_shard_size, filename=save_filename, trained_only=trained_only)
        if self._mesh.data.index == 0 and is_adapted(self.module) and not self._has_warned_of_adapters:
            self._has_warned_of_adapters = True
            logger.warning(
                "engine.save_16bit_model: '%s' got the adapters alone, in PEFT's files, and not the base model. For the whole "
                "model, close the engine and save what merge_and_unload() returns",
                save_dir,
            )
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
        self._write("exporting weights", save_directory, max_shard_size)

    def save_fp32_model(self, save_directory: str | Path, max_shard_size: int | str = "50GB") -> None:
        """Write the fp32 main weights as `save_pretrained` writes model weights; what is frozen is cast to fp32.

        Raises:
            CheckpointError, StorageError, ModelError: as `save_pretrained`.
        """
        self._write("exporting weights", save_directory, max_shard_size, dtype=torch.float32)

    def _write(
        self,
        what: str,
        directory: str | Path,
        max_shard_size: int | str,
        *,
        filename: str | None = None,
        trained_only: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Save on the first rank. See `save_weights`."""
        check_directory(directory)
        try:
            max_shard_bytes = parse_bytes(max_shard_size)
        except ValueError as error:
            raise ValueError(f"max_shard_size {error}, got {max_shard_size!r}") from None
        self._guard.check_loaded()
        self.flush()
        check_apart(self._mesh, Path(directory))

        save = functools.partial(
            save_weights,
            self._weights(),
            Path(directory),
            max_shard_bytes,
            filename=filename,
            trained_only=trained_only,
            dtype=dtype,
        )
        gathered_stream = self._parts.access.gathered_stream
        # Main weights of divided states, and in stage 3 model weights, need every rank's shard.
        needs_all = self._parts.exchange.is_divided or (dtype is not None and self._parts.access.is_divided)
        if needs_all and gathered_stream is not None:
            gathered_stream.run(what, save)
        elif self._mesh.data.index == 0:
            save()
        self._num_saved_steps = self.global_steps

    def _weights(self) -> Weights:
        parts = self._parts
        return Weights(
            parts.parameter_map,
            parts.coordinator,
            parts.access.main_weights,
            self.config.nvme_paths,
            self.config.infinity.progress_bars,
        )

    # --------------------------------------------------------------------------------------------------------- the model

    def _leave_weights(self, is_wanted: bool | None, restore: Callable[[], None]) -> None:
        """Finish pending updates, and copy the weights back into the model: see [Note: weights at the end].

        Args:
            is_wanted: True: restore the weights, and raise errors. None: restore them if they take at most half of the
                free memory. False: do not.
            restore: makes the model an ordinary one.
        """
        if is_wanted:
            self.flush()
            restore()
            return
        num_bytes, free = sum(unit.num_bytes for unit in self._parts.parameter_map.units), 0
        if is_wanted is None:
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else free_bytes()
        has_room = num_bytes <= free // _SHARE
        try:
            self.flush()
            if is_wanted is None:
                if self._parts.exchange.is_divided:  # then all ranks that have shards of the weights need room
                    of_ranks = self._mesh.data.all_gather_ints("closing the engine", [has_room])
                    has_room = all(has_it for (has_it,) in of_ranks)
                if has_room:
                    restore()
        except Exception:  # the states go anyway
            logger.warning(
                "an update or write that was still pending failed while the engine was closed", exc_info=True
            )
        if is_wanted is None and not has_room and self.global_steps > self._num_saved_steps:
            logger.warning(
                "the trained weights are released with the engine: they take %s, which is more than half of the free "
                "memory (%s). Next time, save them before (engine.save_16bit_model), or call "
                "engine.close(restore_weights=True)",
                format_bytes(num_bytes),
                format_bytes(free),
            )
