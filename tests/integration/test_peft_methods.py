"""PEFT's methods beside LoRA: prompts, prefixes, rescaling, other factorizations. Trained as in plain torch, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.exactness.lockstep import everything_on_nvme
from tests.stand_in.models import llama

peft = pytest.importorskip("peft")

_LINEAR = {"target_modules": ["q_proj", "v_proj"]}
_PROMPT = {"num_virtual_tokens": 4}
_FEED_FORWARD = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
_SCHEDULE = {"total_step": 10, "tinit": 0, "tfinal": 2, "deltaT": 1, "init_r": 4, "target_r": 1}
_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("PromptTuningConfig", _PROMPT),
    "prompts of tasks": ("MultitaskPromptTuningConfig", {**_PROMPT, "num_tasks": 2}),
    "prefix": ("PrefixTuningConfig", _PROMPT),
    "prefix, projected": ("PrefixTuningConfig", {**_PROMPT, "prefix_projection": True, "encoder_hidden_size": 16}),
    "P-tuning": ("PromptEncoderConfig", {**_PROMPT, "encoder_hidden_size": 16}),
    "P-tuning, LSTM": ("PromptEncoderConfig", {**_PROMPT, "encoder_reparameterization_type": "LSTM"}),
    "adaption prompt": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}),
    "IA3": ("IA3Config", _FEED_FORWARD),
    "LoHa": ("LoHaConfig", {**_LINEAR, "r": 2}),
    "LoKr": ("LoKrConfig", {**_LINEAR, "r": 2}),
    "OFT": ("OFTConfig", {**_LINEAR, "oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {**_LINEAR, "boft_block_size": 4}),
    "VeRA": ("VeraConfig", {**_LINEAR, "r": 2}),
    "AdaLoRA": ("AdaLoraConfig", {**_LINEAR, **_SCHEDULE}),
    "DoRA": ("LoraConfig", {**_LINEAR, "r": 2, "use_dora": True}),
    "LoRA on a parameter": (
        "LoraConfig",
        {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]},
    ),
    "Fourier": ("FourierFTConfig", {**_LINEAR, "n_frequency": 10}),
    "reflections": ("HRAConfig", {**_LINEAR, "r": 2}),
    "vector bank": ("VBLoRAConfig", {**_LINEAR, "num_vectors": 16, "vector_length": 4}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "tokens": ("TrainableTokensConfig", {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 5]}),
}


def _make(method: str) -> tuple[Any, torch.optim.Optimizer]:
    model = llama()
    kind, options = _METHODS[method]
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of CUDA's compiler, of values that are set to others
        model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train(method: str, model: Any, optimizer: Any) -> list[torch.Tensor]:
    losses = []
    for number in range(3):
        tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(number))
        tasks = {"task_ids": torch.tensor([0, 1])} if method == "prompts of tasks" else {}
        loss = model(input_ids=tokens, labels=tokens, **tasks).loss
        loss.backward()
        optimizer.step()
        if method == "AdaLoRA":  # which ranks weights by their gradients
            model.base_model.update_and_allocate(number)
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _generate(method: str, model: Any) -> torch.Tensor:
    tasks = {"task_ids": torch.tensor([0])} if method == "prompts of tasks" else {}
    words: torch.Tensor = model.eval().generate(
        input_ids=torch.arange(3, 11)[None], max_new_tokens=4, do_sample=False, pad_token_id=0, **tasks
    )
    return words


@pytest.mark.deep(but=1)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("method", _METHODS)
def test_a_method_of_peft_is_trained_as_in_plain_torch(method: str, tmp_path: Path) -> None:
    plain, plain_optimizer = _make(method)
    expected = _train(method, plain, plain_optimizer)
    model, optimizer = _make(method)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = infinity.initialize(
        model=model, optimizer=optimizer, config=everything_on_nvme(tmp_path, {"optimizer": None})
    )
    with engine:
        assert torch.equal(torch.stack(_train(method, model, optimizer)), torch.stack(expected))
        weights = model.state_dict()
        assert weights.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name], value), name
        assert any(not torch.equal(value, before[name]) for name, value in weights.items())
        states = optimizer.state_dict()["state"]
        for key, entry in plain_optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(states[key][name], value), (key, name)
        assert torch.equal(_generate(method, model), _generate(method, plain))
        saved = peft.get_peft_model_state_dict(model)
        for name, value in peft.get_peft_model_state_dict(plain).items():
            assert torch.equal(saved[name], value), name
