"""Buffers keep their dtype under 16-bit weights, wherever torch can compute with that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.exactness.case import Case
from tests.exactness.lockstep import BF16, Lockstep, everything_on_nvme

_FP16: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 64}}


class Buffered(nn.Module):
    """Rotary frequencies far out, a counter, running statistics of several kinds, and a codebook's usage."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("count", torch.tensor(300.0))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("used", torch.zeros(8))
        self.linear = nn.Linear(8, 8)
        self.normed = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.learned = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(8000, 8000 + x.shape[1]).float(), self.inv_freq).repeat(1, 2)
        h = x * angles.cos().to(x.dtype) + x.roll(1, -1) * angles.sin().to(x.dtype)
        if self.training:
            self.count += 1
            self.mean.lerp_(h.detach().double().mean((0, 1)), 1e-3)
            self.used.mul_(0.999).add_(h.detach().float().abs().sum((0, 1)), alpha=1e-3)
        h = self.normed(self.linear(h).transpose(1, 2))
        h = self.learned(self.plain(h)).transpose(1, 2) / (1 + self.used).to(x.dtype)
        result: torch.Tensor = (self.head(h) * self.count.rsqrt().to(x.dtype)).float().square().mean()
        return result


_CASE = Case("buffered", Buffered, lambda draw: {"x": draw.floats(2, 6, 8)}, has_checkpointing=False)


@pytest.mark.parametrize("changes", [{}, BF16, _FP16], ids=["fp32", "bf16", "fp16"])
def test_training_equals_plain_torch_with_its_buffers_as_they_came(changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=_CASE, changes=changes) as both:
        for step in range(3):
            both.engine_step(step)
        both.require_equal()
        found = {fqn: buffer.dtype for fqn, buffer in both.model.named_buffers() if buffer.is_floating_point()}
        in_weights_dtype = {"learned.running_mean", "learned.running_var"}
        for fqn, dtype in found.items():
            expected = torch.float64 if fqn == "mean" else both.dtype if fqn in in_weights_dtype else torch.float32
            assert dtype == expected, fqn


def test_rotary_frequencies_of_a_model_loaded_in_bf16_stay_fp32(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "saved")
    drive = tmp_path / "drive"
    drive.mkdir()
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    batch = {
        "input_ids": torch.arange(16).view(1, 16),
        "labels": torch.arange(16).view(1, 16),
        "position_ids": torch.arange(8000, 8016).view(1, 16),
    }
    changes = {**BF16, "gradient_accumulation_steps": 2}
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(drive, changes))
    with engine:
        assert torch.equal(engine.eval()(**batch).loss, plain.eval()(**batch).loss)
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        engine.train()
        assert engine.train_batch(iter([batch, batch])).isfinite()


class Positions(nn.Module):
    """The table of the tutorials: added in its own dtype, it makes the activations fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("table", torch.randn(6, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x + self.table).float().square().mean()
        return result


def test_a_buffer_that_meets_weights_names_the_cure(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=Positions(), config=everything_on_nvme(tmp_path, BF16))
    with engine, pytest.raises(RuntimeError, match=r"'table' is float32.*data_types.buffer_dtype' to \"bfloat16\""):
        engine(torch.ones(2, 6, 8).bfloat16())
    unrelated, *_ = infinity.initialize(model=Positions(), config=everything_on_nvme(tmp_path, BF16))
    with unrelated, pytest.raises(RuntimeError) as caught:
        unrelated(torch.ones(2, 5, 8).bfloat16())
    assert not getattr(caught.value, "__notes__", [])


def test_the_config_casts_buffers(tmp_path: Path) -> None:
    changes = {**BF16, "data_types": {"buffer_dtype": "bfloat16"}}
    plain, model = Positions().bfloat16(), Positions()
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path, changes))
    with engine:
        assert model.table.dtype == torch.bfloat16
        x = torch.randn(2, 6, 8).bfloat16()
        assert torch.equal(engine(x), plain(x))


@pytest.mark.filterwarnings("ignore::infinity.errors.OtherNumbersWarning")  # fp64 parameters are trained in fp32
@pytest.mark.parametrize("came", [torch.bfloat16, torch.float64])
def test_buffers_of_a_model_that_is_cast_to_fp32_as_a_whole_go_with_it(came: torch.dtype, tmp_path: Path) -> None:
    model = Positions().to(came)
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine:
        assert model.table.dtype == torch.float32 and engine(torch.ones(2, 6, 8)).isfinite()
