"""The model that is to be trained: how many parameters it has, and how many bytes a step of it moves.

The bytes come from the engine's own planner (`infinity.planning`), for a model that has shapes
and no data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.config import load_config
from infinity.device.host_memory import free_share
from infinity.errors import BudgetTooSmallError
from infinity.numerics.state_format import StateFormat
from infinity.planning.cost_model import best_placement, predict
from infinity.planning.inputs import Request, UnitSize, guessed_order, make_units
from infinity.planning.placement import place

_COUNT = re.compile(r"([0-9][0-9_]*\.?[0-9]*(?:e[+]?[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_DTYPE = torch.bfloat16
_ADAM_STATES = 2
_NUM_BLOCKS, _OF_NUMBER, _DEPTH = 32, 7e9, 0.4
"""Models of 7e9 parameters have about 32 blocks, and depth grows with so much of a power of size: 16 for 1e9, 80 for 70e9."""
_MOST_PARAMETERS = 10**14


class ModelRefused(ValueError):
    """No model can be made of what was given; the message says why."""


@dataclass(frozen=True)
class StepBytes:
    """What one optimizer step reads from the drives and writes to them, and the host memory that is given for it."""

    read: int
    write: int
    budget_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    """A model as far as its I/O goes: bf16 with AdamW, parameters and optimizer state on NVMe, one micro-batch per step,
    no clipping.

    Attributes:
        name: for sentences.
        num_parameters: all of them.
        least: bytes with as little host memory as works.
        roomy: bytes with as much memory as the engine takes here of its own accord; None if that is too little.
        states: how optimizer states are stored.
    """

    name: str
    num_parameters: int
    least: StepBytes
    roomy: StepBytes | None
    states: StateFormat = StateFormat.FP32


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
            f"--model {text}: neither a number of parameters (7B, 374M, 1.2e9) nor the path of a Hugging Face config; "
            "names on the hub are not looked up"
        )
    value = float(match[1].replace("_", "")) * _FACTORS[match[2].lower()]
    if not 1 <= value <= _MOST_PARAMETERS:
        raise ModelRefused(f"--model {text}: a model has between 1 and {_MOST_PARAMETERS:.0e} parameters")
    return _count_words(round(value)), _of_equal_blocks(round(value))


def facts_of(name: str, model: nn.Module, states: StateFormat = StateFormat.FP32) -> ModelFacts:
    """What the engine's planner says of a model whose optimizer states are stored as ``states``."""
    drives = {"device": "nvme", "nvme_path": "/"}
    config = load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 3, "offload_param": drives, "offload_optimizer": drives},
            "infinity": {"state_dtype": states.value},
        },
        check_storage=False,
    )
    units = make_units(model, config)
    sizes = [UnitSize.of(unit, _ADAM_STATES) for unit in units]
    request = Request.of(config, model, units, budget_bytes=1 << 62, shares_host_memory=True)

    def step_bytes(budget_bytes: int) -> StepBytes:
        given, order = dataclasses.replace(request, budget_bytes=budget_bytes), guessed_order(len(sizes))
        placement = best_placement(sizes, given, order, len(sizes))
        prediction = predict(sizes, given, placement, order, len(sizes))
        return StepBytes(prediction.read_bytes, prediction.write_bytes, budget_bytes)

    try:
        roomy = step_bytes(free_share(holds_activations=True).budget_bytes)
    except BudgetTooSmallError:
        roomy = None
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelFacts(name, num_parameters, step_bytes(place(sizes, request).minimum_bytes), roomy, states)


def _of_equal_blocks(num_parameters: int) -> nn.Module:
    """A stack of blocks, as most large models are; nobody said how it is built."""
    num_blocks = min(_num_blocks(num_parameters), num_parameters)
    blocks = nn.ModuleList()
    for index in range(num_blocks):
        numel = num_parameters // num_blocks + (index < num_parameters % num_blocks)
        weight = nn.Parameter(torch.empty(numel, dtype=_DTYPE, device="meta"))
        blocks.append(nn.ParameterDict({"weight": weight}))
    return nn.ModuleDict({"blocks": blocks})


def _num_blocks(num_parameters: int) -> int:
    return max(4, round(_NUM_BLOCKS * math.pow(num_parameters / _OF_NUMBER, _DEPTH)))


def _from_config(path: Path) -> nn.Module:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the config is here: nothing is looked up
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelRefused(f"--model {path}: there is no config.json in this directory")
    _check_json(path, file)
    with _without_collections():
        model = _built(path, file)
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
        raise ModelRefused(
            f"--model {path}: a model has at most {_MOST_PARAMETERS:.0e} parameters: look at the sizes in {file.name}"
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
            f"--model {path}: {file.name} is {what}, and a model's config is an object of keys and values: name the "
            "config.json that lies beside a model's weights"
        )


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """While transformers is imported, which makes a million objects that stay, no garbage is looked for among them, nor later."""
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _built(path: Path, file: Path) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        why = "" if is_missing else f", which cannot be imported here: {_one_line(error)}"
        raise ModelRefused(
            f"--model {path}: a Hugging Face config needs transformers (pip install 'infinity-offload[hf]'){why}; a number "
            "such as --model 7B does not"
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
    raise ModelRefused(f"--model {path}: no model can be made of this config: {_one_line(refused)}") from refused


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
