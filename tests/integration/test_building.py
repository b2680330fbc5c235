"""Models that are built inside `infinity.Init` are never in memory, and train as those that were."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StorageError
from tests.children import run_python
from tests.exactness.lockstep import BF16, everything_on_nvme
from tests.internals import drive_tensors, has_drive_tensors, on_drive
from tests.small_transformers import SMALL, make


def _mixtral() -> nn.Module:
    torch.manual_seed(0)
    return make(
        "MixtralForCausalLM",
        **SMALL,
        intermediate_size=96,
        num_key_value_heads=4,
        num_local_experts=4,
        tie_word_embeddings=True,
    )


def _trained(model: nn.Module, config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    with infinity.initialize(model=model, config=config)[0] as engine:
        losses = []
        for step in range(3):
            tokens = torch.arange(24).reshape(2, 12) + step
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses, {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_a_model_built_on_drives_trains_bit_for_bit_as_one_in_memory(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_tensors, "LEAST_BYTES", 1)
    config = everything_on_nvme(tmp_path, changes)
    with infinity.Init(config=config):
        model = _mixtral()
        # A frozen fp32 weight under bf16 is kept as it came, until initialize is over.
        model.lm_head.requires_grad_(False)
    assert all(on_drive(parameter) for parameter in model.parameters())
    plain = _mixtral()
    plain.lm_head.requires_grad_(False)
    losses, weights = _trained(model, config)
    assert not has_drive_tensors()
    expected_losses, expected = _trained(plain, config)
    assert losses == expected_losses
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
def test_an_initialize_that_fails_gives_the_model_back_on_drives(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_tensors, "LEAST_BYTES", 1)
    config = everything_on_nvme(tmp_path, changes)
    with infinity.Init(config=config):
        model = _mixtral()
    model.model.layers[0].half()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fails(optimizer: Any) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        infinity.initialize(model=model, config=config, lr_scheduler=fails)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name
    assert all(on_drive(parameter) for parameter in model.parameters())


def test_a_full_drive_in_initialize_leaves_the_model_as_it_was(small_tmpfs: Callable[[int], Path]) -> None:
    config = everything_on_nvme(small_tmpfs(4 << 20))
    with infinity.Init(config=config):
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StorageError):
        infinity.initialize(model=model, config=config)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.deep
def test_nothing_is_left_after_a_kill(nvme_dir: Path) -> None:
    code = (
        "import sys, time, torch, infinity\n"
        f"place = {{'device': 'nvme', 'nvme_path': {str(nvme_dir)!r}}}\n"
        "with infinity.Init(config={'zero_optimization': {'stage': 3, 'offload_param': place}}):\n"
        "    model = torch.nn.Linear(4096, 8192)\n"
        "    print('built', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        is_built = process.stdout is not None and process.stdout.readline() == "built\n"
        process.kill()
    assert is_built
    assert not list(nvme_dir.iterdir())


@pytest.mark.root
@pytest.mark.deep
def test_a_model_larger_than_its_memory_is_built_taken_over_and_trained(
    nvme_dir: Path, run_in_little_memory: Callable[..., list[dict[str, Any]]]
) -> None:
    [bounded] = run_in_little_memory("built_on_drives", "run", str(nvme_dir), num_layers=5)
    call = f"from tests.built_on_drives import run\nrun(None, {str(nvme_dir)!r}, num_layers=5)\n"
    plain = json.loads(run_python("-c", call).stdout)
    assert (bounded["sums"], bounded["losses"]) == (plain["sums"], plain["losses"])
    assert not bounded["is_left"]
    assert bounded["built_bytes"] < bounded["parameters_bytes"] / 4 < plain["built_bytes"] / 3
