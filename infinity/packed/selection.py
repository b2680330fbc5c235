"""Which weights of a model are stored packed, and in which format, by the config's ``frozen_dtype``.

Packed are frozen weights of ``nn.Linear`` and of transformers' ``Conv1D``, and 3-D parameters of modules whose class
name has "expert". Not packed are embeddings, tied weights, adapters, tiles, and weights that are not in C order.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.packed.blocks import FP8_TILE, NF4_BLOCK
from infinity.packed.formats import COMPUTE_DTYPES, packed_format
from infinity.units.adapters import is_adapted, is_base
from infinity.units.experts import ExpertTiles
from infinity.units.layout import SLOT_GRANULE, round_up

KEY = "infinity.frozen_dtype"
FrozenDtype = str | tuple[tuple[str, str], ...]
"""A format for all weights that can be packed; or pairs (pattern, format), of which the first that matches decides."""


def packed_weights(model: nn.Module, frozen_dtype: FrozenDtype | None, compute_dtype: torch.dtype) -> dict[int, str]:
    """``id`` of each parameter to be packed -> the name of its format.

    Raises:
        ConfigError: a pattern matches no parameter, or none that can be packed.
    """
    if frozen_dtype is None:
        return {}
    found: dict[int, str] = {}
    names = _packable(model)
    if isinstance(frozen_dtype, str):
        found = {key: frozen_dtype for key in names}
    else:
        everything = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]  # with tied heads
        for pattern, name in frozen_dtype:
            matching = [key for key, (fqn, _) in names.items() if _matches(fqn, pattern)]
            # A pattern that matches nothing is probably a typing error. "bf16" may match weights that are not packed:
            # that is how a pattern leaves some out.
            if not matching and not (name == "bf16" and any(_matches(fqn, pattern) for fqn in everything)):
                raise _unmatched(pattern, everything)
            for key in matching:
                found.setdefault(key, name)
    return {key: name for key, name in found.items() if _is_smaller(names[key][1], name, compute_dtype)}


def _is_smaller(parameter: nn.Parameter, name: str, compute_dtype: torch.dtype) -> bool:
    # 16-bit weights as bf16 would have as many bytes as before.
    if compute_dtype not in COMPUTE_DTYPES or (name == "bf16" and compute_dtype.itemsize == 2):
        return False
    # Slots start at multiples of 64 elements, so a small weight may unpack into its padding as well.
    padded = round_up(parameter.numel(), SLOT_GRANULE)
    if parameter.dim() == 3 and not _ends_with_experts(parameter, name):
        return False
    return packed_format(name).saves_memory(tuple(parameter.shape), compute_dtype.itemsize, padded)


def _ends_with_experts(parameter: nn.Parameter, name: str) -> bool:
    """Whether no block or tile reaches into the next expert."""
    # An expert that is paged alone (`infinity.experts`) starts a block. Numbers must not depend on that, so blocks of a
    # tensor of all experts must end with each expert.
    _, rows, columns = parameter.shape
    return {"nf4": rows * columns % NF4_BLOCK == 0, "fp8_e4m3": rows % FP8_TILE == 0}.get(name, True)


def _packable(model: nn.Module) -> dict[int, tuple[str, nn.Parameter]]:
    """``id`` -> FQN and parameter, of all parameters that can be packed."""
    is_of_base = is_base(model) if is_adapted(model) else lambda parameter: not parameter.requires_grad
    of_experts = {
        id(tile) for module in model.modules() if isinstance(module, ExpertTiles) for tile in module.experts()
    }
    owners: dict[int, int] = {}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            # Counts every place that has the parameter: one that is tied, to an embedding for example, has two.
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
            is_linear = _is_linear_weight(module, name, parameter)
            is_expert = id(module) in of_experts or _holds_experts(module, parameter)
            if (is_linear or is_expert) and _is_plain(parameter) and is_of_base(parameter):
                found[id(parameter)] = f"{prefix}.{name}" if prefix else name, parameter
    return {key: each for key, each in found.items() if owners[key] == 1}


def _is_plain(parameter: nn.Parameter) -> bool:
    if type(parameter) is not nn.Parameter or parameter.requires_grad or not parameter.is_contiguous():
        return False
    # fp64 would be rounded, and float8 weights have scales of their own.
    return parameter.is_floating_point() and parameter.element_size() in (2, 4)


def _is_linear_weight(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    # By name: transformers is not imported for it. GPT-2 has `Conv1D`, a linear layer with a transposed weight.
    is_linear = isinstance(module, nn.Linear) or any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    return is_linear and name == "weight" and parameter.dim() == 2


def _holds_experts(module: nn.Module, parameter: nn.Parameter) -> bool:
    is_named_so = any("expert" in cls.__name__.lower() for cls in type(module).__mro__)
    return is_named_so and parameter.dim() == 3


def _matches(fqn: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name or its module's, with or without PEFT's wrappers."""
    # "base_model.model.lm_head.base_layer.weight" matches "lm_head": without PEFT's parts and ".weight", and with any
    # prefix.
    plain = fqn.replace(".base_layer.", ".").replace(".original_module.", ".")
    names = {fqn, plain, plain.removesuffix(".weight")}
    return any(fnmatch.fnmatchcase(name, form) for name in names for form in (pattern, f"*.{pattern}"))


def _unmatched(pattern: str, fqns: Collection[str]) -> ConfigError:
    problem = f"it matches no parameter of the model. Names are {', '.join(list(fqns)[:3])}, ..."
    cure = "Give a pattern of such names"
    if any(_matches(fqn, pattern) for fqn in fqns):
        problem = (
            "it matches parameters, but none of them can be packed. Only untied frozen weights of linear layers and "
            "of experts can"
        )
        cure = "Freeze them before infinity.initialize (requires_grad_(False)), or take the pattern out"
    return ConfigError.value(KEY, pattern, problem, cure=cure)
