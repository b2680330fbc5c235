"""What the errors say when user code holds on to weights, or casts them: causes, and cures that work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import BudgetTooSmallError, ModelError
from tests.exactness.lockstep import BF16, everything_on_nvme


class _Keeping(torch.autograd.Function):
    """As some write it: the weight is an attribute of the context, past ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight.data
        ctx.save_for_backward(inputs)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (inputs,) = ctx.saved_tensors
        return grads[0] @ ctx.weight, grads[0].t() @ inputs


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Keeping.apply(inputs, self.weight)
        return result


def test_weights_kept_by_a_function_are_told_with_a_minimum_that_suffices(tmp_path: Path) -> None:
    budget, messages = 1 << 20, []
    for attempt in range(3):
        torch.manual_seed(0)
        model = nn.Sequential(*[_Linear() for _ in range(12)])
        changes = {"infinity": {"host_memory_budget": budget, "page_bytes": None}}
        try:
            config = everything_on_nvme(tmp_path / str(attempt), changes)
            with infinity.initialize(model=model, config=config)[0] as engine:
                engine.backward(engine(torch.ones(2, 256)).sum())
                engine.step()
            break
        except BudgetTooSmallError as error:
            budget = error.minimum_bytes
            messages.append(str(error))
    else:
        pytest.fail(f"no budget sufficed: {messages}")
    assert "User code keeps tensors" in messages[-1] and "ctx.save_for_backward(weight)" in messages[-1]


def _switch(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_experts": 4}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    quiet = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(**sizes, **layers, **quiet, **options)
    return transformers.SwitchTransformersForConditionalGeneration(config)


def test_a_router_that_casts_itself_is_told_with_a_cure_that_works(tmp_path: Path) -> None:
    def train(directory: Path, **options: Any) -> None:
        model = _switch(**options).to(torch.bfloat16)
        ids = torch.ones(2, 6, dtype=torch.long)
        with infinity.initialize(model=model, config=everything_on_nvme(directory, BF16))[0] as engine:
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()

    with pytest.raises(ModelError, match=r"routers of Switch Transformers.*router_dtype='bfloat16'"):
        train(tmp_path / "float32")
    train(tmp_path / "bfloat16", router_dtype="bfloat16")
