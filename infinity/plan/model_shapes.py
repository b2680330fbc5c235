"""A model as far as a plan needs it: shapes without data, from a number of parameters or from a Hugging Face config."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

_COUNT = re.compile(r"([0-9][0-9_]*\.?[0-9]*(?:e[+]?[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_DTYPE = torch.bfloat16
_NUM_BLOCKS, _OF_NUMBER, _DEPTH = 32, 7e9, 0.4
"""Models of 7e9 parameters have about 32 blocks, and depth grows with so much of a power of size: 16 for 1e9, 80 for 70e9."""
_SQUARES_IN_BLOCK = 12
"""A block of a transformer has about so many times the square of its width in parameters."""
_MOST_PARAMETERS = 10**14


class ModelRefused(ValueError):
    """No model can be made of what was given; the message says why."""


def read_model(text: str) -> tuple[str, nn.Module]:
    """`7B`, `374M`, a number, or the path of a Hugging Face config (file or directory): a name, and a model without data.

    Raises:
        ModelRefused: it is none of these.
    """
    if Path(text).exists():
        return text, _from_config(Path(text))
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ModelRefused(
            f"{text}: neither a number of parameters (7B, 374M, 1.2e9) nor the path of a Hugging Face config; "
            "names on the hub are not looked up"
        )
    value = float(match[1].replace("_", "")) * _FACTORS[match[2].lower()]
    if not 1 <= value <= _MOST_PARAMETERS:
        raise ModelRefused(f"{text}: a model has between 1 and {_MOST_PARAMETERS:.0e} parameters")
    return _count_words(round(value)), _of_equal_blocks(round(value))


class _Adapted(nn.Module):
    """A linear layer under LoRA, without data."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        dtype = base.weight.dtype
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, dtype=dtype, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank, dtype=dtype, device="meta"))


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model without data, and put LoRA of this rank on each linear layer but its head, in place.

    Raises:
        ModelRefused: it has no linear layer.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ParameterDict):  # a block of which nobody said how it is built
                setattr(module, name, _block(child["weight"].numel()))
    model.requires_grad_(False)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                setattr(module, name, _Adapted(child, rank))
                found += 1
    if not found:
        raise ModelRefused("the model has no linear layer that could be adapted")
    return model


def _block(numel: int) -> nn.Module:
    width = max(round(math.sqrt(numel / _SQUARES_IN_BLOCK) / 64) * 64, 1)
    linear = nn.Linear(width, max(numel // width, 1), bias=False, dtype=_DTYPE, device="meta")
    block = nn.ModuleDict({"linear": linear})
    if left := numel - linear.weight.numel():
        block.register_parameter("rest", nn.Parameter(torch.empty(left, dtype=_DTYPE, device="meta")))
    return block


def _of_equal_blocks(num_parameters: int) -> nn.Module:
    """A stack of blocks, as most large models are; nobody said how it is built."""
    usual = max(4, round(_NUM_BLOCKS * math.pow(num_parameters / _OF_NUMBER, _DEPTH)))
    num_blocks = min(usual, num_parameters)
    blocks = nn.ModuleList()
    for index in range(num_blocks):
        numel = num_parameters // num_blocks + (index < num_parameters % num_blocks)
        weight = nn.Parameter(torch.empty(numel, dtype=_DTYPE, device="meta"))
        blocks.append(nn.ParameterDict({"weight": weight}))
    return nn.ModuleDict({"blocks": blocks})


def _from_config(path: Path) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the config is here: nothing is looked up
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelRefused(f"{path}: there is no config.json in this directory")
    _check_json(path, file)
    model = _built(path, file)
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
        raise ModelRefused(
            f"{path}: a model has at most {_MOST_PARAMETERS:.0e} parameters: look at the sizes in {file.name}"
        )
    return model


def _check_json(path: Path, file: Path) -> None:
    """What is no object makes transformers raise whatever comes to it. The rest it says itself."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(found, dict):
        what = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(type(found), "a number")
        raise ModelRefused(
            f"{path}: {file.name} is {what}, and a model's config is an object of keys and values: name the "
            "config.json that lies beside a model's weights"
        )


def _built(path: Path, file: Path) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        why = "" if is_missing else f", which cannot be imported here: {_one_line(error)}"
        raise ModelRefused(
            f"{path}: a Hugging Face config needs transformers (pip install 'infinity-offload[hf]'){why}; a number "
            "such as 7B does not"
        ) from None
    refused: Exception | None = None
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
        for build in _builders(transformers, config):
            try:
                with torch.device("meta"):
                    model: nn.Module = build(config)
                    return model
            except ValueError as error:  # so the second refuses a config of no language model
                refused = error
    except Exception as error:  # whatever an unusual config makes the library raise
        refused = error
    raise ModelRefused(f"{path}: no model can be made of this config: {_one_line(refused)}") from refused


def _one_line(error: Exception | None) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300]


def _builders(transformers: Any, config: Any) -> Iterator[Callable[[Any], Any]]:
    """The class that the config names, as what trains has its heads and all its parts; then what fits the kind of model."""
    for name in config.architectures or ():
        named: Any = getattr(transformers, name, None)
        if inspect.isclass(named) and issubclass(named, transformers.PreTrainedModel):
            build: Any = named
            yield build._from_config
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        yield functools.partial(kind.from_config, trust_remote_code=False)


def _count_words(count: int) -> str:
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= factor:
            return f"{count / factor:.4g}{letter} parameters"
    return f"{count} parameters"


# ------------------------------------------------------------------------------------------------------------- experts

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
_CHOSEN_BY_KIND = {"switch_transformers": 1, "nllb-moe": 2}
"""Their configs do not say it."""


def active_share(model: nn.Module) -> float:
    """Of a model's parameters, those that one token is computed with: of experts, the chosen ones."""
    num_chosen = _num_chosen(getattr(model, "config", None))
    total = sum(parameter.numel() for parameter in model.parameters())
    if num_chosen is None or not total:
        return 1.0
    idle = 0.0
    for name, module in model.named_modules():
        for numel, num_experts in _experts(name, module):
            idle += numel and numel * max(0.0, 1 - num_chosen / num_experts)
    return 1 - idle / total


def _num_chosen(config: Any) -> int | None:
    """Experts per token; None if that is not said."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for section in (text, getattr(text, "ffn_config", None)):
        for name in _CHOSEN:
            found = section.get(name) if isinstance(section, dict) else getattr(section, name, None)
            if isinstance(found, list | tuple) and found:  # of each layer
                found = max(found)
            if isinstance(found, int) and found > 0:
                return found
    return _CHOSEN_BY_KIND.get(getattr(text, "model_type", ""))


def _experts(name: str, module: nn.Module) -> list[tuple[int, int]]:
    """Elements of experts that this module holds itself, and how many experts share them."""
    last = name.rpartition(".")[2]
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in last and "shared" not in last:
        numels = [sum(parameter.numel() for parameter in each.parameters()) for each in module.children()]
        return [(sum(numels), sum(numel > 0 for numel in numels))]  # an activation may lie beside them
    own = list(module.parameters(recurse=False))
    if isinstance(count := getattr(module, "num_experts", None), int):
        return [(each.numel(), count) for each in own if each.dim() == 3 and len(each) == count]
    if isinstance(count := getattr(module, "moe_num_experts", None), int):  # DBRX: one below the other, in one matrix
        return [(each.numel(), count) for each in own if len(each) > count and len(each) % count == 0]
    return []
