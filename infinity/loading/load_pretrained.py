"""`load_pretrained`: a model with the weights of files, without reading them into memory.

[Note: no copies] A tensor that needs no conversion becomes a parameter as it is, over a private mapping of its file.
transformers casts, merges, splits or transposes the others, one parameter after the other; their results are in
nameless files beside the states. All of this memory is pages of files, which the kernel can drop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import InfinityConfig, load_config
from infinity.config.schema.directories import make_directories
from infinity.device.drive_tensors import large_results_on
from infinity.errors import CheckpointError, ModelError
from infinity.loading import hugging_face
from infinity.loading.outcome import Outcome
from infinity.loading.quantized_files import QuantizedFiles
from infinity.loading.weight_files import open_weights
from infinity.packed.sources import set_source


def load_pretrained(
    model_or_class: Any,
    path: str | Path,
    *,
    config: str | Path | dict[str, Any] | InfinityConfig | None = None,
    dtype: torch.dtype | str | None = None,
    key_mapping: Mapping[str, str] | None = None,
    ignore_missing_keys: bool = False,
    ignore_unexpected_keys: bool = False,
    ignore_mismatched_sizes: bool = False,
    output_loading_info: bool = False,
    **options: Any,
) -> Any:
    """A model with weights from files, bit for bit as ``from_pretrained`` gives it, without memory for them.

    What comes back is an ordinary model: it can be looked at, run, and given to `infinity.initialize`, which moves unit
    after unit to where the config says. Until then the files must stay as they are (a save that replaces them does no harm).

    Args:
        model_or_class: a transformers class or Auto class; its config is read from the directory, and the model comes
            back in evaluation mode. Or any ``torch.nn.Module``, with its parameters on the meta device or with values;
            those that had values stay the same objects. All keep their ``requires_grad``.
        path: a directory with safetensors or ``pytorch_model.bin``, one file or shards with an index; or one such file,
            or one with a state dict that ``torch.save`` wrote, for a module.
        config: where large results lie that are not in the files as they are (its ``nvme_path``). Without one, or with
            none in it, they lie in memory.
        dtype: for a class, as in ``from_pretrained``: "auto" (the default) is the config's or else the files'. A module's
            parameters keep theirs.
        key_mapping: names in the files -> names in the model (regular expressions, each is replaced where it is found).
        ignore_missing_keys: what the files lack is not an error. A parameter on the meta device is then made anew as
            transformers does it; one that has values keeps them.
        ignore_unexpected_keys: what only the files have is not an error.
        ignore_mismatched_sizes: what has another shape in the files is not an error, and is treated as missing.
        output_loading_info: whether to return, besides, a dict with the names that were missing, unexpected, mismatched.
        options: for a class, what ``from_pretrained`` takes besides for the model and its config.

    Returns:
        The model; with ``output_loading_info``, the model and that dict.

    Raises:
        CheckpointError: a file is missing, cut off or broken.
        ModelError: it is quantized, or no class for it is known; or names and shapes of all tensors that do not fit. A
            module with values may be changed in part.
        StorageError: there is no room on the drives.
    """
    dtype = options.pop("torch_dtype", None) if dtype is None else dtype  # its name in transformers 4
    place = Path(os.path.expanduser(path))
    is_module = isinstance(model_or_class, nn.Module)
    if not is_module and hugging_face.is_earlier(model_or_class):
        raise ModelError(
            f"load_pretrained needs transformers 5 or later to build {model_or_class.__name__}",
            cure="Run pip install 'transformers>=5'; or load the model with from_pretrained, which needs memory for "
            "all weights, and pass it to infinity.initialize",
        )
    if not is_module and not hugging_face.is_ours(model_or_class):
        raise TypeError(f"model_or_class must be a torch.nn.Module or a class of transformers, not {model_or_class!r}")
    if is_module and (options or dtype is not None):
        named = ", ".join(sorted([*options, *([] if dtype is None else ["dtype"])]))
        raise TypeError(f"{named}: only applies to a class, and you passed a module")
    resolved = load_config(config) if config is not None else None
    directories = resolved.nvme_paths if resolved is not None else ()
    make_directories(directories)
    # Unpacks quantized files. What is not quantized stays a mapping of its file.
    quantized = QuantizedFiles(
        place, open_weights(place), _wanted_dtype(dtype, model_or_class, place, options), directories
    )
    tensors = quantized.tensors
    with large_results_on(directories):
        if not is_module:
            extra = {"dtype": dtype} if dtype is not None else {}
            mapped = {"key_mapping": dict(key_mapping)} if key_mapping is not None else {}
            model, outcome = hugging_face.load_class(model_or_class, place, tensors, {**options, **extra, **mapped})
        elif hugging_face.is_ours(model_or_class):
            model, outcome = model_or_class, hugging_face.load_module(model_or_class, place, tensors, key_mapping)
        else:
            renamed = _renamed(place, tensors, key_mapping or {})
            model, outcome = model_or_class, _load_module(model_or_class, renamed)
    # A parameter that kept the unpacked tensor's memory has its packed bytes as well. Merged or cast ones have other
    # memory, and are packed again by `initialize`.
    packed_at = quantized.packed_at()
    for parameter in model.parameters():
        source = packed_at.get(parameter.data_ptr())
        if source is not None:
            set_source(parameter, *source)
    info = outcome.check(
        place,
        ignore_missing=ignore_missing_keys,
        ignore_unexpected=ignore_unexpected_keys,
        ignore_mismatched=ignore_mismatched_sizes,
    )
    return (model, info) if output_loading_info else model


def _wanted_dtype(
    dtype: torch.dtype | str | None, model_or_class: Any, path: Path, options: Mapping[str, Any]
) -> torch.dtype | None:
    """The dtype of the model, to unpack quantized weights to. A later cast would round again, and lose the packed bytes.

    None: the files' own.
    """
    if isinstance(model_or_class, nn.Module):
        return next((each.dtype for each in model_or_class.parameters() if each.is_floating_point()), None)
    if dtype is None or dtype == "auto":
        dtype = hugging_face.dtype_of_config(path, options)
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) else None


def _renamed(
    path: Path, tensors: Mapping[str, torch.Tensor], key_mapping: Mapping[str, str]
) -> Mapping[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        new = name
        for pattern, replacement in key_mapping.items():
            new = re.sub(pattern, replacement, new)
        if new in renamed:
            problem = f"has two tensors for '{new}' with key_mapping"
            raise CheckpointError.of_weights(path, problem, cure="Change its patterns")
        renamed[new] = value
    return renamed


# ------------------------------------------------------------------------------ a module that is not of transformers


def _load_module(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Outcome:
    """Give parameters and buffers these values, cast to their dtypes, with their own strides.

    A tied parameter may be in the files under any one of its names. ``_load_from_state_dict`` of modules and extra
    states are not used.

    Raises:
        ModelError: a non-persistent buffer is on the meta device, so its values are unknown.
    """
    places = _places(model)
    wanted: dict[str, torch.Tensor] = {name: values[last] for name, (values, last, _) in places.items()}
    mismatched = sorted(
        (name, tuple(tensors[name].shape), tuple(value.shape))
        for name, value in wanted.items()
        if name in tensors and tensors[name].shape != value.shape
    )
    odd = [
        (name, str(tensors[name].dtype).removeprefix("torch."))
        for name, value in wanted.items()
        if name in tensors and _loses_values(tensors[name], value)
    ]
    unfit = {name for name, *_ in (*mismatched, *odd)}
    made: dict[int, torch.Tensor] = {}
    loaded: set[int] = set()
    owners: dict[int, int] = {}
    """Address of a storage of the files -> id of the parameter or buffer that has it."""
    for name, value in wanted.items():
        if name in tensors and name not in unfit:
            loaded.add(id(value))
            # torch.save keeps aliases: two names may share one storage. Only the first becomes a parameter without a
            # copy, or training one would change the other.
            is_free = owners.setdefault(tensors[name].untyped_storage().data_ptr(), id(value)) == id(value)
            is_buffer = places[name][2]
            if is_buffer and not value.is_meta:
                with torch.no_grad():
                    value.copy_(tensors[name])  # in place, as load_state_dict: others may view it
                continue
            new = _fitted(value, tensors[name], is_free=is_free)
            if not value.is_meta:
                value.data = new  # it stays the same object
            elif is_buffer:
                made[id(value)] = new
            elif id(value) not in made:
                made[id(value)] = nn.Parameter(new, requires_grad=value.requires_grad)
    for name, value in wanted.items():
        # A tensor on meta is replaced by a new object, under all of its names.
        if id(value) in made:
            values, last, _ = places[name]
            values[last] = made[id(value)]
    _refuse_unknown_buffers(model)
    missing = sorted(name for name, value in wanted.items() if name not in unfit and id(value) not in loaded)
    return Outcome(missing, sorted(tensors.keys() - wanted.keys()), mismatched, sorted(odd))


def _places(model: nn.Module) -> dict[str, tuple[dict[str, Any], str, bool]]:
    """Name -> the module's dict with the tensor, its key there, and whether it is a buffer."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kinds: Any = (module._parameters, False), (module._buffers, True)
        for values, is_buffer in kinds:
            for last, value in values.items():
                if value is not None and not (is_buffer and last in module._non_persistent_buffers_set):
                    found[f"{prefix}.{last}" if prefix else last] = values, last, is_buffer
    return found


def _loses_values(new: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a cast loses more than rounding does: between integers and floats, or of imaginary parts."""
    if new.is_complex() or value.is_complex():
        return not (value.is_complex() and (new.is_complex() or new.is_floating_point()))
    return new.is_floating_point() != value.is_floating_point()


def _fitted(value: torch.Tensor, found: torch.Tensor, *, is_free: bool) -> torch.Tensor:
    """``found`` with dtype and strides of ``value``. ``is_free``: no other tensor uses the memory of ``found``."""
    new = found.to(value.dtype)
    # The strides that a copy of the parameter would have. The file has C order.
    wanted = torch.empty_like(value, device="meta")
    if new.stride() != wanted.stride() or (new is found and not is_free):
        new = torch.empty_like(wanted, device="cpu").copy_(new)
    return new


def _refuse_unknown_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        module, _, last = name.rpartition(".")
        if buffer.is_meta and last in model.get_submodule(module)._non_persistent_buffers_set:
            problem = f"buffer '{name}' is on the meta device and in no state dict, so it has no values"
            cure = "Make the module's buffers with values (accelerate.init_empty_weights(include_buffers=False))"
            raise ModelError(problem, cure=cure, fqn=name)
