"""transformers' own loading, with tensors that are not in memory. Needs transformers 5 or later.

transformers converts names and layouts, ties weights, and initializes what the files lack.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import CheckpointError, ModelError
from infinity.loading.outcome import Outcome
from infinity.loading.quantized_files import check_method

# Arguments of `from_pretrained` that are refused -> the reason, or what to do instead.
_MADE_ELSEWHERE = {
    "device_map": "infinity.initialize places it",
    "state_dict": "the files have one",
    "quantization_config": 'to store frozen weights packed, set "infinity": {"frozen_dtype": "nf4"}',
    **dict.fromkeys(
        ("gguf_file", "variant", "subfolder", "revision", "trust_remote_code"), "name the files themselves"
    ),
    **dict.fromkeys(("distributed_config", "tp_plan", "device_mesh"), "each process holds the whole model"),
}
_SCALED = ("float8", "float4")  # parts of dtypes' names whose values need scales from another tensor


def is_ours(model_or_class: Any) -> bool:
    """Whether it is a model, class or Auto class of transformers 5. Other libraries have `from_pretrained`, too."""
    return hasattr(model_or_class, "from_pretrained") and (
        hasattr(model_or_class, "_finalize_model_loading") or hasattr(model_or_class, "_model_mapping")
    )


def is_earlier(model_class: Any) -> bool:
    """Whether it is a class of transformers 4, which loads by other private functions."""
    is_of_library = str(getattr(model_class, "__module__", "")).startswith("transformers.")
    return is_of_library and importlib.metadata.version("transformers").startswith("4.")


def dtype_of_config(path: Path, options: Mapping[str, Any]) -> Any:
    """What ``dtype="auto"`` means: the config's dtype; None if it has none. `load_class` reports a broken config."""
    if "model_config" in options:
        return getattr(options["model_config"], "dtype", None)
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        config = json.loads((path / "config.json").read_bytes())
        return config.get("dtype", config.get("torch_dtype"))
    return None


def load_class(
    model_class: Any, path: Path, tensors: Mapping[str, torch.Tensor], options: Mapping[str, Any]
) -> tuple[nn.Module, Outcome]:
    """Make a model with these tensors.

    Args:
        model_class: a class or Auto class of transformers.
        path: a directory with a config.
        tensors: of the files, by name.
        options: for ``from_pretrained``.
    """
    for name in options.keys() & _MADE_ELSEWHERE.keys():
        raise TypeError(f"{name} has no meaning in load_pretrained: {_MADE_ELSEWHERE[name]}")
    if not (path / "config.json").is_file():
        cure = "Pass a module instead of a class, or the directory that has one"
        raise CheckpointError.of_weights(path, "has no config.json", cure=cure)
    model_config, rest = _read_config(model_class, path, dict(options))
    if getattr(model_config, "quantization_config", None) is not None:
        check_method(path, model_config.quantization_config)
        vars(model_config).pop("quantization_config")  # else transformers would expect quantized tensors
    chosen = _choose(model_class, model_config, path)
    of_text = model_config.sub_configs.get("text_config")
    if of_text is not None and model_class is not chosen and getattr(chosen, "config_class", None) == of_text:
        model_config = model_config.get_text_config()  # as the Auto classes do for a text model in a multimodal config
    with one_after_the_other(), _as_model_error(path):
        # With `state_dict` and no path, it loads no file: these tensors become the parameters.
        model, info = chosen.from_pretrained(
            None,
            config=model_config,
            state_dict=dict(tensors),
            # `Outcome.check` raises later, for everything that does not fit, in one error.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **rest,
        )
    # What `from_pretrained(path)` would set: the path, and generation settings.
    model.config._name_or_path = str(path)
    if model.can_generate():
        local: dict[str, Any] = dict.fromkeys(("cache_dir", "proxies", "token", "revision", "trust_remote_code"))
        local |= {"force_download": False, "local_files_only": True, "subfolder": ""}
        model.adjust_generation_fn(rest.get("generation_config"), False, None, str(path), **local)
    missing, unexpected, mismatched = (info[f"{key}_keys"] for key in ("missing", "unexpected", "mismatched"))
    odd = _of_another_kind(model, tensors)
    return model, Outcome(sorted(missing), sorted(unexpected), _shapes(mismatched), odd)


def load_module(
    model: Any, path: Path, tensors: Mapping[str, torch.Tensor], key_mapping: Mapping[str, str] | None
) -> Outcome:
    """Load weights into a model that exists. See `infinity.loading.load_pretrained`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    before = {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())
    has_values = {name for name, value in (*before.items(), *buffers.items()) if not value.is_meta}
    mapping: Any = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path), ignore_mismatched_sizes=True, dtype=model.dtype, weight_mapping=mapping
    )
    with one_after_the_other(), _as_model_error(path):
        # The steps of `from_pretrained` after the model was made. There, every parameter is on meta at this point.
        # Here, some may have values, which are kept if the files lack them.
        info, _ = model._load_pretrained_model(model, dict(tensors), None, load_config)
        mismatched = _shapes(info.mismatched_keys)
        kept = info.missing_and_mismatched() & has_values
        # transformers initializes parameters without this mark.
        for name in kept:
            model.get_parameter_or_buffer(name)._is_hf_initialized = True
        # Nothing was on meta: `_finalize_model_loading` would initialize what the files lack. Only ties and names are
        # left to do.
        if has_values >= before.keys():
            model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
            model._adjust_missing_and_unexpected_keys(info)
            missing = info.missing_keys
        else:
            info.missing_keys.difference_update(kept)
            info.mismatched_keys.difference_update({each for each in info.mismatched_keys if each[0] in kept})
            model._finalize_model_loading(model, load_config, info)
            # transformers may have made non-persistent buffers anew (rotary frequencies). The script's own are put
            # back.
            for name in buffers.keys() & has_values:
                owner, _, last = name.rpartition(".")
                module = model.get_submodule(owner)
                if last in module._non_persistent_buffers_set:
                    module._buffers[last] = buffers[name]
            missing = info.missing_keys | (kept - {name for name, *_ in mismatched})
    _keep_objects(model, before)
    return Outcome(sorted(missing), sorted(info.unexpected_keys), mismatched, _of_another_kind(model, tensors))


def _read_config(model_class: Any, path: Path, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoConfig

    given = options.pop("model_config", None)
    if given is not None:
        return given, options
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    kept = {"dtype": options.pop("dtype")} if "dtype" in options else {}
    found, rest = config_class.from_pretrained(path, return_unused_kwargs=True, **options)
    return found, {**rest, **kept}


def _choose(model_class: Any, model_config: Any, path: Path) -> Any:
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return model_class
    from transformers.models.auto import auto_factory

    if type(model_config) not in mapping:
        problem = f"{model_class.__name__} has no class for '{path}', whose model type is '{model_config.model_type}'"
        raise ModelError(problem, cure="Pass the class itself, or a module made on the meta device")
    factory: Any = auto_factory
    return factory._get_model_class(model_config, mapping)


@contextlib.contextmanager
def one_after_the_other() -> Iterator[None]:
    """Let transformers convert parameters one by one, in this thread."""
    # Its threads read ahead of the conversion, without a limit on the memory that this takes.
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _as_model_error(path: Path) -> Iterator[None]:
    """Turn errors of transformers' conversions into a `CheckpointError`."""
    try:
        yield
    except RuntimeError as error:
        if "conversion" not in str(error):
            raise
        problem = "holds tensors that do not fit together"
        raise CheckpointError.of_weights(path, problem, cure=f"transformers says: {error}") from error


def _shapes(mismatched: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return sorted((name, tuple(there), tuple(here)) for name, there, here in mismatched)


def _of_another_kind(model: Any, tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Floating-point parameters that the files have as integers, or in a format that needs scales."""
    odd = {name: value.dtype for name, value in tensors.items() if not _is_ordinary(value.dtype)}
    if not odd:
        return []
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    used = getattr(model, "_weight_conversions", None) or []
    renamings = [each for each in used if isinstance(each, WeightRenaming)]
    converters = [each for each in used if isinstance(each, WeightConverter)]
    there = model.state_dict(keep_vars=True)
    found = []
    for name, dtype in odd.items():
        # The error should name the model's parameter: files may have another name for it.
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, there)
        target = there.get(renamed)
        if target is not None and target.dtype != dtype and _is_ordinary(target.dtype):
            found.append((renamed, str(dtype).removeprefix("torch.")))
    return sorted(found)


def _is_ordinary(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and not any(name in str(dtype) for name in _SCALED)


def _keep_objects(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Keep parameter objects that had values, with the new values in them. Keep ``requires_grad`` of all."""
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            old = before.get(f"{prefix}.{name}" if prefix else name)
            if parameter is None or old is None or parameter is old:
                continue
            if old.is_meta:
                parameter.requires_grad_(old.requires_grad)
                continue
            # An optimizer of the script may hold the old object, so it gets the new memory. A tied parameter comes up
            # once per name.
            if made.get(id(old)) is not parameter:
                old.data = parameter.data
                made[id(old)] = parameter
            module._parameters[name] = old
