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
from infinity.loading import hugging_face, plain_module
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
    quantized = QuantizedFiles(place, open_weights(place), _wanted_dtype(dtype, model_or_class), directories)
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
            model, outcome = model_or_class, plain_module.load_module(model_or_class, renamed)
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


def _wanted_dtype(dtype: torch.dtype | str | None, model_or_class: Any) -> torch.dtype | None:
    """The dtype to unpack quantized weights to; None: as the files say."""
    if isinstance(model_or_class, nn.Module):
        return next((each.dtype for each in model_or_class.parameters() if each.is_floating_point()), None)
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
