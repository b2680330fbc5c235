"""Ranks with divided weights generate texts of different lengths together: the tokens of the model in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.exactness import mixtures
from tests.exactness.families import VOCABULARY
from tests.exactness.lockstep import everything_on_nvme
from tests.exactness.paged import least_budget
from tests.ranks import on_ranks
from tests.small_transformers import MODELS

_HOW: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}]


def _made(family: str) -> Any:
    torch.manual_seed(0)
    return (mixtures.frozen(mixtures.make(family)) if family in mixtures.FAMILIES else MODELS[family]()).eval()


def _engine(model: Any, directory: Path) -> Any:
    """With the least memory, so that units come and go."""
    config = everything_on_nvme(directory, {"infinity": {"staging_buffer_bytes": None}})
    config["infinity"]["host_memory_budget"] = least_budget(model, config)
    return infinity.initialize(model=model, config=config)[0]


def _generated(model: Any, rank: int, how: dict[str, Any], **settings: Any) -> torch.Tensor:
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(3, VOCABULARY, (1, 3 + 2 * rank), generator=generator)
    num = 2 + 3 * rank
    settings |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": num, "min_new_tokens": num}
    generated: torch.Tensor = model.generate(input_ids=prompt, **settings, **how)
    return generated


@pytest.mark.deep
@pytest.mark.parametrize(("num", "family"), [(2, "llama"), (3, "llama"), (2, "qwen3_moe")])
@on_ranks()
def test_texts_of_different_lengths_are_those_of_the_model_in_memory(
    rank: int, num: int, family: str, tmp_path: Path
) -> None:
    """With experts, those are fetched of which a rank that goes on alone has tokens."""
    model = _made(family)
    plain = copy.deepcopy(model)
    with _engine(model, tmp_path) as engine:
        for how in _HOW:
            found = _generated(engine, rank, how, synced_gpus=True)
            assert torch.equal(found, _generated(plain, rank, how))
