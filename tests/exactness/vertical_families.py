"""Small models of many of transformers' families: which of them `train_batch` takes through the vertical schedule.

``vertical_families.tsv`` has the answer for each, with dropout (if it has any), LoRA and both kinds of activation checkpointing:
why its first step goes in the ordinary order, and its second. Nothing means that it goes vertically. What the shapes of
`tests.exactness.shapes` do is written in `tests.exactness.vertical_training`.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.exactness.case import Draw
from tests.exactness.lockstep import engine_on_nvme

NUM_STEPS = 2
_NUM_MICRO_BATCHES = 3
_LIST = Path(__file__).with_suffix(".tsv")
_VERTICAL: dict[str, Any] = {"gradient_accumulation_steps": _NUM_MICRO_BATCHES, "infinity": {"schedule": "vertical"}}

_WORDS = 96
_LENGTH = 6


@dataclass(frozen=True)
class Family:
    """A model of transformers, by its class and what its config gets, and the batches it is trained on."""

    model: str
    config: dict[str, Any]
    batch: Callable[[Draw], dict[str, Any]]


def _causal(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 3, 2, _LENGTH) + 3
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _causal_growing(draw: Draw) -> dict[str, Any]:
    """Longer than any before in the second step's last micro-batch."""
    longest = (draw.step, draw.micro_batch) == (1, 2)
    tokens = draw.integers(_WORDS - 3, 2, 40 if longest else _LENGTH) + 3
    return {"input_ids": tokens, "labels": tokens}


def _full(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 3, 2, _LENGTH) + 3
    return {"input_ids": tokens, "labels": tokens}


def _encoder_decoder(draw: Draw) -> dict[str, Any]:
    return {"input_ids": draw.integers(_WORDS - 3, 2, _LENGTH) + 3, "labels": draw.integers(_WORDS - 3, 2, 4) + 3}


def _images(draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.floats(2, 3, 16, 16), "labels": draw.integers(5, 2)}


def _large_images(draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.floats(2, 3, 64, 64), "labels": draw.integers(5, 2)}


def _sounds(draw: Draw) -> dict[str, Any]:
    return {"input_values": draw.floats(2, 800), "labels": draw.integers(5, 2)}


def _spectra(draw: Draw) -> dict[str, Any]:
    return {"input_features": draw.floats(2, 8, 16), "labels": draw.integers(_WORDS - 3, 2, 4) + 3}


def _pairs(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 3, 2, _LENGTH) + 3
    return {"input_ids": tokens, "pixel_values": draw.floats(2, 3, 16, 16), "return_loss": True}


def _captions(draw: Draw) -> dict[str, Any]:
    tokens = draw.integers(_WORDS - 4, 2, 24) + 3
    tokens[:, :16] = _WORDS - 1
    return {"input_ids": tokens, "pixel_values": draw.floats(2, 3, 16, 16), "labels": tokens}


def _pixels(draw: Draw) -> dict[str, Any]:
    return {"pixel_values": draw.floats(2, 3, 16, 16)}


FAMILIES: dict[str, Family] = {
    name: Family(model, config, globals()[f"_{batch}"])
    for name, (model, batch, config) in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
"""By name; ``vertical_families.json`` has class, batches and config of each."""


def _options(model: str, config: dict[str, Any], probability: float) -> Any:
    """The config of a model, in which all kinds of dropout have this probability."""
    import transformers

    kind = getattr(transformers, model).config_class
    made = kind(**config)
    waiting = [made]
    while waiting:
        each = waiting.pop()
        for name, value in list(vars(each).items()):
            if isinstance(value, transformers.PreTrainedConfig):
                waiting.append(value)
            elif isinstance(value, float) and any(part in name for part in ("dropout", "pdrop", "drop_path_rate")):
                setattr(each, name, probability)
    return made


def make(family: Family, variant: str) -> nn.Module | None:
    """The model; None if it has no such variant."""
    import transformers

    if variant in ("plain", "dropout") and _has_dropout(family) != (variant == "dropout"):
        return None
    torch.manual_seed(20)
    config = _options(family.model, family.config, 0.1 if variant == "dropout" else 0.0)
    model: Any = getattr(transformers, family.model)(config)
    if variant in ("reentrant", "non_reentrant"):
        if not model.supports_gradient_checkpointing:
            return None
        model.gradient_checkpointing_enable({"use_reentrant": variant == "reentrant"})
        if variant == "reentrant":
            if family.model.startswith("Swin"):  # its embeddings give a tuple
                return None
            model.enable_input_require_grads()
    if variant == "lora":
        import peft

        torch.manual_seed(21)
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        targets = [name for name in linear if not name.endswith("out_proj") or "mamba" not in config.model_type]
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2))
    return model.train()


def _has_dropout(family: Family) -> bool:
    return repr(_options(family.model, family.config, 0.0)) != repr(_options(family.model, family.config, 0.1))


def schedules(
    model: nn.Module, batch: Callable[[Draw], Any], directory: Path, num_steps: int = NUM_STEPS
) -> Iterator[tuple[Any, str]]:
    """Train; gives the engine and, after each step, why it went in the ordinary order (empty: it went vertically)."""
    with engine_on_nvme(directory, model, _VERTICAL) as engine:
        for step in range(num_steps):
            torch.manual_seed(100 + step)
            np.random.seed(100 + step)  # what is masked, and left out
            random.seed(100 + step)
            draws = [Draw(step, index, torch.float32, torch.device("cpu")) for index in range(_NUM_MICRO_BATCHES)]
            engine.train_batch(iter([batch(draw) for draw in draws]))
            yield engine, engine.report.schedule_reason


def listed() -> list[tuple[str, str, list[str]]]:
    """The list: name, variant, and the reason of each step."""
    with _LIST.open(newline="") as file:
        return [(name, variant, reasons) for name, variant, *reasons in csv.reader(file, delimiter="\t")]
