"""Bases in files that are quantized already: loaded with their own codes and scales, and trained over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import infinity
from infinity.errors import CheckpointError
from tests.exactness.lockstep import engine_on_nvme, everything_on_nvme
from tests.stand_in.models import llama

_WIDTHS = {"hidden_size": 64, "intermediate_size": 160}
_TOKENS = torch.arange(24).view(2, 12)


def _fp8_files(directory: Path) -> dict[str, torch.Tensor]:
    """A base whose linear layers are in FP8, with scales that packing anew would not give; and its plain weights in bf16."""
    model = llama(**_WIDTHS).to(torch.bfloat16)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    plain = dict(tensors)
    for name, value in list(tensors.items()):
        if "_proj.weight" in name:
            scales = torch.rand(tuple(-(-size // 128) for size in value.shape)) / 100 + 0.001
            of_each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
            codes = (value.float() / of_each).to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            plain[name] = (codes.float() * of_each).to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return plain


def _trained(model: Any, directory: Path, frozen_dtype: Any) -> list[torch.Tensor]:
    """Losses and logits, with the norms trained over a frozen base."""
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    changes = {"bf16": {"enabled": True}, "infinity": {"frozen_dtype": frozen_dtype}}
    engine = engine_on_nvme(directory, model, changes)
    seen = []
    with engine:
        for _ in range(2):
            loss = engine(input_ids=_TOKENS, labels=_TOKENS).loss
            engine.backward(loss)
            engine.step()
            seen.append(loss.detach())
        with torch.no_grad():
            return [*seen, engine(input_ids=_TOKENS).logits]


def test_fp8_files_are_stored_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    plain = _fp8_files(tmp_path / "base")
    config = everything_on_nvme(tmp_path / "nvme", {"bf16": {"enabled": True}})
    loaded = infinity.load_pretrained(AutoModelForCausalLM, tmp_path / "base", config=config, dtype=torch.bfloat16)
    assert isinstance(loaded, LlamaForCausalLM)
    weights = loaded.state_dict()
    assert [name for name, value in plain.items() if not torch.equal(weights[name], value)] == []
    llama(**_WIDTHS).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    packed = _trained(
        loaded, tmp_path / "nvme", {"lm_head": "bf16", "*": "fp8_e4m3"}
    )  # the head is not quantized there
    for found, wanted in zip(packed, _trained(expected, tmp_path / "nvme", None), strict=True):
        assert torch.equal(found, wanted)


def test_other_methods_are_named(tmp_path: Path) -> None:
    _fp8_files(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"GPTQ.*frozen_dtype"):
        infinity.load_pretrained(AutoModelForCausalLM, tmp_path / "base")
