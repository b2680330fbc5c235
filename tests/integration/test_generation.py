"""Models that only compute: Hugging Face's ``generate`` with weights from a drive, and adapters that are merged there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.exactness.lockstep import BF16, everything_on_nvme, merged
from tests.exactness.paged import least_budget
from tests.internals import Unit, WeightStore
from tests.small_transformers import make

_SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_ROOMY = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
_NUM_TOKENS = 12

_llama = partial(make, "LlamaForCausalLM", **_ROOMY, num_hidden_layers=6)
_mixtral = partial(make, "MixtralForCausalLM", **_ROOMY, num_hidden_layers=3, num_local_experts=4)
_gpt2 = partial(make, "GPT2LMHeadModel", vocab_size=256, n_embd=32, n_layer=4, n_head=4, n_positions=64, pad_token_id=0)
_T5 = {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
_t5 = partial(make, "T5ForConditionalGeneration", **_T5, decoder_start_token_id=0)


def _made(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build().eval()


def _engine(model: Any, directory: Path, changes: dict[str, Any] | None = None) -> Any:
    """With the least budget there is."""
    own = {"optimizer": None, "infinity": {"staging_buffer_bytes": None}}
    config = everything_on_nvme(directory, merged(own, changes or {}))
    config["infinity"]["host_memory_budget"] = least_budget(model, config)
    return infinity.initialize(model=model, config=config)[0]


def _prompt() -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 250, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(
    "how",
    [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}],
    ids=["greedy", "sampled", "beams"],
)
@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("build", [_llama, _mixtral, _gpt2, _t5], ids=["llama", "mixtral", "gpt2", "t5"])
def test_generated_tokens_are_those_of_the_model_in_memory(
    build: Callable[[], Any], changes: dict[str, Any], how: dict[str, Any], tmp_path: Path
) -> None:
    model = _made(build)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters() if changes else ():  # buffers keep their dtype
        parameter.data = parameter.data.bfloat16()
    with _engine(model, tmp_path, changes) as engine:
        engine.eval()
        found = []
        for generator in (plain, engine):
            torch.manual_seed(3)
            found.append(generator.generate(**_prompt(), max_new_tokens=_NUM_TOKENS, **how))
    assert torch.equal(*found)


def test_a_token_reads_each_weight_once_and_ahead_of_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, bool]] = []
    fetch = WeightStore.fetch

    def watched(self: WeightStore, unit: Unit, *, is_demand: bool) -> Any:
        fetched.append((unit.name, is_demand))
        return fetch(self, unit, is_demand=is_demand)

    monkeypatch.setattr(WeightStore, "fetch", watched)
    with _engine(_made(_llama), tmp_path) as engine:
        engine.eval()
        num_units = len(engine._coordinator.parameter_cache.units)
        fetched.clear()
        engine.generate(**_prompt(), max_new_tokens=_NUM_TOKENS, min_new_tokens=_NUM_TOKENS, do_sample=False)
        assert _NUM_TOKENS * num_units <= len(fetched) < (_NUM_TOKENS + 1) * num_units
        assert sum(is_demand for _, is_demand in fetched) == 1  # the very first
        steady = [name for name, _ in fetched[num_units:]]
        assert all(name == steady[index % num_units] for index, name in enumerate(steady))  # across tokens, too


def test_without_training_there_are_weights_and_nothing_else(tmp_path: Path) -> None:
    with _engine(_made(_llama), tmp_path) as engine:
        plan = dict(engine.plan.rows())
        num_bytes = sum(size for _, size in engine.plan.units)
        assert engine.plan.predicted_read_bytes_per_step == num_bytes
        assert sum(engine.plan.states_bytes.values()) == num_bytes
        assert engine.plan.placement.gradient_bytes == 0
        assert "predicted read per forward" in plan
        assert not {"optimizer update", "predicted written per step"} & set(plan)
