"""Writes weights as safetensors, tensor by tensor: those of an engine, or of a checkpoint, without memory for a model.

`original_names` has transformers' names and layouts.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.checkpoint.arrays import as_storage_error
from infinity.checkpoint.checkpoint_loading import other_shapes
from infinity.checkpoint.original_names import original_entries
from infinity.checkpoint.safetensors_file import Entry, check_entries, refuse, write_file
from infinity.checkpoint.saved import Checkpoint, SavedTensor
from infinity.device.drive_tensors import DriveTensors
from infinity.errors import CheckpointError, ModelError, listed
from infinity.loop.parameter_coordinator import ParameterCoordinator
from infinity.metrics.progress import progress
from infinity.optim.groups import TiledParameter
from infinity.paging.parameter_map import ParameterMap
from infinity.units.adapters import is_adapted
from infinity.units.buffers import persistent_buffers
from infinity.units.layout import Slot
from infinity.units.tiles import tiled_in, untiled_name
from infinity.units.unit import Unit, cast_dtype, is_float8
from swapper.volumes.publish import Staging, locked, sync_tree

_SMALL_NUMEL = 1 << 18
"""Main weights up to this size (1 MiB of fp32) are read together with the unit's others, and kept until written."""
_NAME_OF_PICKLES = "pytorch_model.bin"
"""DeepSpeed's default for `save_16bit_model`. Readers expect a pickle under that name, so the file gets another one."""
T = TypeVar("T")
_ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Weights:
    """Where an engine's weights come from.

    Attributes:
        main_weights: returns copies of the fp32 main weights of some of a unit's parameters, by slot index. For a
            frozen parameter, a copy of its weight.
        directories: large results of conversions lie in files in them.
        shows_progress: on the terminal.
    """

    parameter_map: ParameterMap
    coordinator: ParameterCoordinator
    main_weights: Callable[[Unit, Sequence[Slot]], Mapping[int, torch.Tensor]]
    directories: Sequence[Path]
    shows_progress: bool = False


def save_weights(
    weights: Weights,
    directory: Path,
    max_shard_bytes: int,
    *,
    filename: str | None = None,
    trained_only: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights and buffers as one file, or as shards and an index, and the configs. All files appear at once.

    It writes what the model's modules have now, including parameters that were added later. Files of an earlier save
    are removed at the end. A PEFT model's adapters are written by its own ``save_pretrained``. Memory: a unit's flat
    buffer, and one tensor if it is on a GPU or not contiguous.

    Args:
        weights: where they come from.
        directory: made if it is missing.
        max_shard_bytes: of a file with more than one tensor.
        filename: None: the files of ``model.save_pretrained``, with its names of tensors and its layouts.
        trained_only: leave out parameters that do not require a gradient, and buffers.
        dtype: None: model weights. Else main weights, cast to it, and buffers of the model's dtype as well.

    Raises:
        ModelError: safetensors does not support a tensor; nothing has been written.
        StorageError: the directory cannot be written to or is full; its old files are still there.
    """
    model = weights.parameter_map.model
    stem = "model" if filename is None else filename.removesuffix(".safetensors")
    stem = "model" if stem == _NAME_OF_PICKLES else stem
    with as_storage_error(directory, sum(unit.num_bytes for unit in weights.parameter_map.units), "the weights"):
        if is_adapted(model):
            save_adapters(model, directory)
            return
        entries = all_entries(weights, trained_only=trained_only, dtype=dtype)
        if filename is None:
            entries = original_entries(model, entries, weights.directories)
        # The config names the dtype of these files, as after the model's own save_pretrained.
        configs = functools.partial(save_configs, model, dtype=dtype or _dtype_of(model))
        total = sum(entry.num_bytes for entry in entries)
        with progress("saving weights", total, is_shown=weights.shows_progress) as note:
            write_shards(entries, directory, stem, configs, max_shard_bytes, note)


def cut(tensors: Iterable[T], max_shard_bytes: int, num_bytes_of: Callable[[T], int]) -> list[list[T]]:
    """Divide tensors into shards of at most ``max_shard_bytes``, in order. A larger tensor gets a shard of its own."""
    shards: list[list[T]] = [[]]
    size = 0
    for tensor in tensors:
        num_bytes = num_bytes_of(tensor)
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    return shards


def write_shards(
    entries: Sequence[Entry],
    directory: Path,
    stem: str,
    configs: Callable[[Staging], Sequence[str]],
    max_shard_bytes: int,
    note: Callable[[int], None],
) -> None:
    """Write one file, or shards and an index. All appear at once, see ``swapper.volumes.publish``.

    Args:
        directory: made if it is missing.
        stem: of the files' names.
        configs: writes further files into a staging directory, and returns their names there.
        max_shard_bytes: of a file with more than one tensor.
        note: gets the number of bytes that were written since its last call.

    Raises:
        ModelError: safetensors does not support a tensor; nothing has been written.
        OSError: the directory cannot be written to or is full; its old files are still there.
    """
    check_entries(entries)
    shards = cut(entries, max_shard_bytes, lambda entry: entry.file_bytes)
    with Staging(directory, stem) as staging:
        # Before writing. The old files stay until the new ones are complete, so both need room.
        if shutil.disk_usage(staging.path).free < sum(entry.file_bytes for entry in entries):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for number, shard in enumerate(shards, start=1):
            with staging.file(f"shard-{number}") as file:
                write_file(file, shard, note)
        _publish(staging, configs(staging), directory, stem, shards)


def _publish(
    staging: Staging, configs: Sequence[str], directory: Path, stem: str, shards: Sequence[Sequence[Entry]]
) -> None:
    has_index = len(shards) > 1
    with locked(directory):
        there = {path.name for path in directory.iterdir()}
        # Under the lock: another process could take these names otherwise.
        names = _free_names(stem, len(shards), there) if has_index else []
        moves = [(f"shard-{number}", name) for number, name in enumerate(names, start=1)]
        head = ("shard-1", f"{stem}.safetensors")
        if has_index:
            head = ("index", f"{stem}.safetensors.index.json")
            with staging.file("index") as file:
                file.write(_index(shards, names))
        # Files of an earlier save with this stem, removed at the end: "model.safetensors",
        # "model-00001-of-00003.safetensors", "model-00001-of-00003.2.safetensors" and "model.safetensors.index.json". A
        # reader takes a single file before an index.
        own = re.compile(rf"{re.escape(stem)}((-\d{{5}}-of-\d{{5}}(\.\d+)?)?\.safetensors|\.safetensors\.index\.json)")
        staging.publish(
            moves, [(name, Path(name).name) for name in configs], head, lambda name: bool(own.fullmatch(name))
        )


def _index(shards: Sequence[Sequence[Entry]], names: Sequence[str]) -> bytes:
    index = {name: file for shard, file in zip(shards, names, strict=True) for entry in shard for name in entry.names}
    total = sum(entry.file_bytes for shard in shards for entry in shard)
    contents = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    return (json.dumps(contents, indent=2) + "\n").encode()


def _free_names(stem: str, num_shards: int, taken: set[str]) -> list[str]:
    """Names of shards that no present file has: the old index refers to the old shards until it is replaced."""
    suffix, turn = "", 1
    while True:
        names = [f"{stem}-{number:05d}-of-{num_shards:05d}{suffix}.safetensors" for number in range(1, num_shards + 1)]
        if taken.isdisjoint(names):
            return names
        turn += 1
        suffix = f".{turn}"


def all_entries(weights: Weights, *, trained_only: bool = False, dtype: torch.dtype | None = None) -> list[Entry]:
    """Parameters and persistent buffers as the model has them now, unit by unit, each with its names.

    Args:
        trained_only: leave out what does not require a gradient.
        dtype: None: the model weights; else the main weights, and buffers that are as wide as the weights, cast to it.
    """
    parameter_map = weights.parameter_map
    names: dict[int, list[str]] = {}
    others: dict[int, nn.Parameter] = {}
    for fqn, parameter in parameter_map.model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or not trained_only:
            names.setdefault(id(parameter), []).append(fqn)
            if not parameter_map.holds(parameter):
                others[id(parameter)] = parameter
    # A model of transformers ties {target: source} itself when it is loaded, so only the source's name is written.
    # Other models get each weight under all of its names, so that a strict load_state_dict finds them.
    tied: Any = getattr(parameter_map.model, "all_tied_weights_keys", None) or {}
    tiles = tiled_in(parameter_map.model)
    for key, (_, number) in tiles.items():
        # A tiled weight is one entry, of its first tile, with the weight's name; the other tiles have none.
        if number:
            names.pop(key, None)
        elif key in names:
            names[key] = [untiled_name(fqn) for fqn in names[key]]
    for key, fqns in names.items():
        names[key] = [fqn for fqn in fqns if tied.get(fqn) not in fqns] or fqns
    # With a dtype, the fp32 main weights are cast, as model weights are rounded already. Without, these are written.
    opened = functools.partial(_model_weight, weights.coordinator) if dtype is None else _MainWeights(weights).of
    found: list[Entry] = []
    for unit in parameter_map.units:
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            own = names.get(id(parameter))
            if own is not None and id(parameter) in tiles:
                found.append(_entry_of_tiles(tiles[id(parameter)][0], own, weights, dtype))
            elif own is not None:
                value = functools.partial(opened, unit, slot)
                found.append(Entry(own, slot.spec.shape, cast_dtype(parameter.dtype, dtype), value, origin=unit))
    found += [Entry(names[key], p.shape, cast_dtype(p.dtype, dtype), _always(p)) for key, p in others.items()]
    if not trained_only:
        for fqn, buffer in persistent_buffers(parameter_map.model, remove_duplicate=False):
            if buffer.layout is not torch.strided or buffer.is_meta or buffer.is_quantized:
                refuse(fqn, f"it is {'on the meta device' if buffer.is_meta else 'sparse or quantized'}")
            # A buffer in the model's dtype follows the weights; others (fp32 rotary frequencies in a bf16 model) keep
            # theirs.
            kept = dtype if dtype is not None and buffer.dtype == _dtype_of(parameter_map.model) else buffer.dtype
            found.append(Entry((fqn,), buffer.shape, kept, _always(buffer)))
    return found


@contextlib.contextmanager
def _model_weight(coordinator: ParameterCoordinator, unit: Unit, slot: Slot) -> Iterator[torch.Tensor]:
    # The unit stays in memory until this tensor is written.
    with coordinator.opened(unit):
        yield unit.weight(slot)


class _MainWeights:
    """Main weights, unit by unit. Small ones are read together, because their slices share records."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._unit: Unit | None = None
        self._small: Mapping[int, torch.Tensor] = {}
        """Slot index -> main weight, of the small parameters of `_unit`."""

    @contextlib.contextmanager
    def of(self, unit: Unit, slot: Slot) -> Iterator[torch.Tensor]:
        """The main weight of one parameter."""
        if slot.numel > _SMALL_NUMEL:
            yield self._weights.main_weights(unit, [slot])[slot.index]
            return
        if self._unit is not unit:
            # The entries of a unit follow each other, so one unit's small weights are kept at a time.
            self._unit, small = unit, [each for each in unit.layout.slots if each.numel <= _SMALL_NUMEL]
            self._small = self._weights.main_weights(unit, small)
        yield self._small[slot.index]


def _entry_of_tiles(tiled: TiledParameter, names: Sequence[str], weights: Weights, dtype: torch.dtype | None) -> Entry:
    """The entry of a tiled weight: written tile by tile, and whole only if a conversion of transformers needs it."""

    def parts() -> Iterator[torch.Tensor]:
        for tile in tiled.tiles:
            unit, slot = weights.parameter_map.locate(tile)
            if dtype is not None:
                yield weights.main_weights(unit, [slot])[slot.index].reshape(-1)
                continue
            with weights.coordinator.opened(unit):
                yield unit.weight(slot).detach().cpu().reshape(-1)

    def value() -> contextlib.nullcontext[torch.Tensor]:
        values = (part.reshape(tile.shape).clone() for part, tile in zip(parts(), tiled.tiles, strict=True))
        return contextlib.nullcontext(tiled.join(list(values)))

    return Entry(names, tiled.shape, cast_dtype(tiled.tiles[0].dtype, dtype), value, parts, origin=tiled)


def _always(value: torch.Tensor) -> Callable[[], contextlib.nullcontext[torch.Tensor]]:
    return lambda: contextlib.nullcontext(value)


def _dtype_of(model: nn.Module) -> torch.dtype:
    dtypes = (each.dtype for each in model.parameters())
    return next((each for each in dtypes if each.is_floating_point and not is_float8(each)), torch.float32)


def save_configs(model: Any, staging: Staging, dtype: torch.dtype, generation: Any = None) -> list[str]:
    """Write a Hugging Face model's configs, and its code if transformers lacks its class. Returns the files' names.

    Args:
        model: any. One without a config has no files.
        staging: they are written into it.
        dtype: of the weights, for the config.
        generation: the generation config; None: the model's.
    """
    folder = staging.path / "configs"
    folder.mkdir()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        # The model in training keeps its own config.
        config = copy.deepcopy(config)
        config.update({"dtype": str(dtype).removeprefix("torch."), "architectures": [type(model).__name__]})
        # A class that the script has registered (trust_remote_code): its .py files belong to the model.
        if isinstance(model, nn.Module) and getattr(model, "_auto_class", None) is not None:
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, folder, config=config)
        config.save_pretrained(folder)
    can_generate = not hasattr(model, "can_generate") or model.can_generate()
    generation = generation or getattr(model, "generation_config", None)
    if can_generate and hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
    names = [f"configs/{path.name}" for path in sorted(folder.iterdir()) if path.is_file()]
    for name in names:
        staging.sync(name)
    return names


def save_adapters(model: Any, directory: Path) -> None:
    """Write PEFT's adapters with the model's own ``save_pretrained``. All files appear at once.

    Raises:
        ModelError: parameters outside the adapters are trained, or the adapters are gone, or of several kinds;
            nothing has been written.
    """
    # The weights are not written under the wrapper's names beside the base's config: from_pretrained would know none of
    # these names, and start from random weights.
    if isinstance(model, sys.modules["peft"].PeftMixedModel):
        problem = "it has adapters of several kinds (mixed=True), for which PEFT has no files"
        raise ModelError(problem, cure="Save engine.module.state_dict() with torch.save")
    # PEFT puts the adapter's name into the FQN: "...q_proj.lora_A.default.weight". After `merge_and_unload` no FQN has
    # one.
    adapters = set(model.peft_config)
    tensors = dict(
        [*model.named_parameters(remove_duplicate=False), *persistent_buffers(model, remove_duplicate=False)]
    )
    own = {fqn for fqn in tensors if not adapters.isdisjoint(fqn.split("."))}
    saved = own | _saved_by_peft(model, tensors)
    # Adaption prompts are not named after their adapter.
    if not own and not any(tensors[fqn].requires_grad and "bias" not in fqn for fqn in saved):
        problem = "the adapters have been merged into the model and unloaded: PEFT would write none of the weights"
        raise ModelError(problem, cure="Save what merge_and_unload() returned, with its own save_pretrained(directory)")
    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad and fqn not in saved:
            problem = f"'{fqn}' is trained, but belongs to no adapter, and PEFT saves adapters only"
            cure = "Name its module in the adapter config's modules_to_save, or save engine.module.state_dict()"
            raise ModelError(problem, cure=cure, fqn=fqn)
    with Staging(directory, "adapter") as staging:
        values = {fqn: tensors[fqn].detach().to("cpu", copy=True) for fqn in tensors if fqn in saved}
        model.save_pretrained(staging.path / "files", state_dict=values)
        folder = staging.path / "files"
        sync_tree(folder)
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        moves = [(f"files/{name}", name) for name in names]
        head = next(move for move in moves if Path(move[1]).name == _ADAPTER_CONFIG)
        with locked(directory):
            staging.publish([], moves, head, lambda name: False)


def _saved_by_peft(model: Any, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """FQNs of what PEFT saves. Each kind of adapter has its own rules, so PEFT is asked, with a state dict on meta."""
    empty = {fqn: torch.empty(each.shape, dtype=each.dtype, device="meta") for fqn, each in tensors.items()}
    names = {id(each): fqn for fqn, each in empty.items()}
    take = sys.modules["peft"].get_peft_model_state_dict
    taken = [each for name in model.peft_config for each in take(model, empty, adapter_name=name).values()]
    # PEFT renames entries, and returns the same tensor objects: identity gives the FQN.
    return {names[id(each)] for each in taken if id(each) in names}


# --------------------------------------------------------------------------------------- of a checkpoint, without engine


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
    if left_out := checkpoint.omitted.excluded:
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
        further = {fqn: first for fqn, first in checkpoint.omitted.tied.items() if first in names and fqn not in names}
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
    try:
        # False: no code in the directory is run, nor is it asked for on the terminal.
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        name = next(iter(getattr(config, "architectures", None) or []), None)
        model_class: Any = getattr(transformers, str(name), None)
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            problem = f"the config in '{directory}' names the class {name!r}, which transformers does not have"
            raise ModelError(problem, cure="Set 'architectures' in it, as save_pretrained does")
        with torch.device("meta"):
            model = model_class(config)  # shapes and names only, no memory
        has_generation = (directory / "generation_config.json").is_file()
        return model, transformers.GenerationConfig.from_pretrained(directory) if has_generation else None
    except ModelError:
        raise
    except Exception as error:  # an unusual config can make transformers raise anything
        reason = " ".join(str(error).split())[:300].rstrip(".")
        problem = f"no model can be built from the config in '{directory}': {reason}"
        raise ModelError(problem, cure="Name the directory of the Hugging Face model that was trained") from error


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
