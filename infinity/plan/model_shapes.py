"""Models without data for plans: from a number of parameters, or from a Hugging Face config."""

from __future__ import annotations

import functools
import inspect
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
# Number of blocks of a model of which only the size is given: 32 * (size / 7e9) ** 0.4. That gives 15 blocks for 1e9,
# 32 for 7e9 and 80 for 70e9 parameters, close to Llama's 16, 32 and 80.
_NUM_BLOCKS, _OF_NUMBER, _DEPTH = 32, 7e9, 0.4
# A transformer block of width w has about 12 * w**2 parameters: 4 in attention, and 8 in an MLP of 4 times the width.
_SQUARES_IN_BLOCK = 12
_MOST_PARAMETERS = 10**14  # far above any model: a mistyped number is refused


class ModelRefused(ValueError):
    """No model can be made of what was given; the message says why."""


def read_model(text: str) -> tuple[str, nn.Module]:
    """Make a model on the meta device from `7B`, `374M`, a number, or the path of a Hugging Face config; with its name.

    Raises:
        ModelRefused: ``text`` is none of these.
    """
    # A path goes first: a directory may be called "7B".
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
    return count_words(round(value)), _of_equal_blocks(round(value))


class _Adapted(nn.Module):
    """A linear layer under LoRA, without data."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        weight = base.get_parameter("weight")
        rows, columns = weight.shape
        self.lora_a = nn.Parameter(torch.empty(rank, columns, dtype=weight.dtype, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(rows, rank, dtype=weight.dtype, device="meta"))


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model without data, and put LoRA of this rank on each linear layer but its head, in place.

    Raises:
        ModelRefused: it has no linear layer.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # A block of `_of_equal_blocks` has one tensor and no linear layer. It is replaced by one with a linear
            # layer.
            if isinstance(child, nn.ParameterDict):
                setattr(module, name, _block(child["weight"].numel()))
    model.requires_grad_(False)
    # PEFT leaves the output head out too, with target_modules="all-linear".
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # GPT-2 has `Conv1D`, a linear layer with a transposed weight.
            is_linear = isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"
            if is_linear and child is not head:
                setattr(module, name, _Adapted(child, rank))
                found += 1
    if not found:
        raise ModelRefused("the model has no linear layer that could be adapted")
    return model


def _block(numel: int) -> nn.Module:
    # One linear layer [width, numel // width], with the width that a transformer block of this size has: adapters of a
    # rank then have about the right size. The remainder of the division becomes a parameter of its own, so that the
    # total is exact.
    width = max(round(math.sqrt(numel / _SQUARES_IN_BLOCK) / 64) * 64, 1)
    linear = nn.Linear(width, max(numel // width, 1), bias=False, dtype=_DTYPE, device="meta")
    block = nn.ModuleDict({"linear": linear})
    if left := numel - linear.weight.numel():
        block.register_parameter("rest", nn.Parameter(torch.empty(left, dtype=_DTYPE, device="meta")))
    return block


def _of_equal_blocks(num_parameters: int) -> nn.Module:
    """A stack of equal blocks, for a model of which only the size is known."""
    usual = max(4, round(_NUM_BLOCKS * math.pow(num_parameters / _OF_NUMBER, _DEPTH)))
    num_blocks = min(usual, num_parameters)
    blocks = nn.ModuleList()
    for index in range(num_blocks):
        # The first blocks get one element more, so that the total is exact: 10 in 4 blocks is 3, 3, 2, 2.
        numel = num_parameters // num_blocks + (index < num_parameters % num_blocks)
        weight = nn.Parameter(torch.empty(numel, dtype=_DTYPE, device="meta"))
        blocks.append(nn.ParameterDict({"weight": weight}))
    return nn.ModuleDict({"blocks": blocks})


def _from_config(path: Path) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the config is a local file, so the hub is never asked
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelRefused(f"{path}: there is no config.json in this directory")
    model = _built(path, file)
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
        most = f"a model has at most {_MOST_PARAMETERS:.0e} parameters"
        raise ModelRefused(f"{path}: {most}: look at the sizes in {file.name}")
    return model


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
            except ValueError as error:  # of AutoModelForCausalLM, for other kinds of models
                refused = error
    except Exception as error:  # an unusual config can make transformers raise anything
        refused = error
    raise ModelRefused(
        f"{path}: no model can be built from this config: {_one_line(refused)}. It has to be the config.json of a model"
    ) from refused


def _one_line(error: Exception | None) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300]


def _builders(transformers: Any, config: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield ways to build the model: first the class that the config names, then transformers' auto classes."""
    # The named class has the heads of the model that is trained. AutoModel would leave them out.
    for name in config.architectures or ():
        named: Any = getattr(transformers, name, None)
        if inspect.isclass(named) and issubclass(named, transformers.PreTrainedModel):
            build: Any = named
            yield build._from_config
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        yield functools.partial(kind.from_config, trust_remote_code=False)


def count_words(count: int) -> str:
    """A number of parameters in words, such as "7B parameters"."""
    for factor, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= factor:
            return f"{count / factor:.4g}{letter} parameters"
    return f"{count} parameters"


# ------------------------------------------------------------------------------------------------------------- experts

# Names under which configs in transformers store the number of experts per token, and models whose configs do not store
# it.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
_CHOSEN_BY_KIND = {"switch_transformers": 1, "nllb-moe": 2}


def active_share(model: nn.Module) -> float:
    """The share of a model's parameters that one token is computed with: of experts, only the chosen ones count."""
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
    """Experts per token; None if the config does not say."""
    # Multimodal models have a config for text inside, and DBRX one for its feed-forward layers.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for section in (text, getattr(text, "ffn_config", None)):
        for name in _CHOSEN:
            found = section.get(name) if isinstance(section, dict) else getattr(section, name, None)
            if isinstance(found, list | tuple) and found:  # one number per layer
                found = max(found)
            if isinstance(found, int) and found > 0:
                return found
    return _CHOSEN_BY_KIND.get(getattr(text, "model_type", ""))


def _experts(name: str, module: nn.Module) -> list[tuple[int, int]]:
    """(elements, number of experts) of the experts that this module holds itself."""
    # Three forms: a list of modules; tensors [experts, ...] as in transformers 5; and DBRX's, with experts stacked in
    # the rows of a matrix. "shared_experts" are used by every token, so they do not count.
    last = name.rpartition(".")[2]
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in last and "shared" not in last:
        numels = [sum(parameter.numel() for parameter in each.parameters()) for each in module.children()]
        return [(sum(numels), sum(numel > 0 for numel in numels))]  # children without parameters are no experts
    own = list(module.parameters(recurse=False))
    if isinstance(count := getattr(module, "num_experts", None), int):
        return [(each.numel(), count) for each in own if each.dim() == 3 and len(each) == count]
    if isinstance(count := getattr(module, "moe_num_experts", None), int):  # DBRX
        return [(each.numel(), count) for each in own if len(each) > count and len(each) % count == 0]
    return []
