"""``infinity.deepspeed.checkpointing``: DeepSpeed's calls, to the bits of plain torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from infinity.deepspeed.contents import checkpointing
from infinity.errors import ConfigError

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


@pytest.fixture(autouse=True)
def _as_at_first() -> Iterator[None]:
    yield
    checkpointing.configure(None)
    checkpointing.get_cuda_rng_tracker().reset()


def _function(x: Tensor, number: int, *, scale: Tensor) -> tuple[Tensor, Tensor, str]:
    hidden = nn.functional.dropout(x * scale, 0.5)
    with checkpointing.get_cuda_rng_tracker().fork():
        hidden = nn.functional.dropout(hidden, 0.5)
    return hidden * number, (hidden > 0), "text"


@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
@pytest.mark.parametrize("in_cpu", [False, True])
def test_arguments_results_and_random_numbers(name: str, in_cpu: bool) -> None:
    checkpointing.configure(None, checkpoint_in_cpu=in_cpu, synchronize=True)
    runs = []
    for call in (lambda f, *a, **k: f(*a, **k), getattr(checkpointing, name)):
        checkpointing.model_parallel_cuda_manual_seed(7)
        x, scale = torch.ones(64, requires_grad=True), torch.full((64,), 2.0, requires_grad=True)
        outputs = []
        for _ in range(2):
            value, mask, text = call(_function, x, 3, scale=scale)
            assert text == "text" and mask.dtype == torch.bool
            outputs.append(value)
        torch.stack(outputs).square().sum().backward()
        drawn = torch.rand(4)
        with checkpointing.get_cuda_rng_tracker().fork():
            tracked = torch.rand(4)
        runs.append([*outputs, x.grad, scale.grad, drawn, tracked])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_tracker_keeps_states_apart() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    tracker.add("other", 5)
    with tracker.fork("other"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with tracker.fork("other"):
        assert not torch.equal(torch.rand(3), first)
    with pytest.raises(ValueError, match="seed 5"):
        tracker.add("another", 5)
    with pytest.raises(ValueError, match="other"):
        tracker.add("other", 6)
    with pytest.raises(KeyError, match="nobody"), tracker.fork("nobody"):
        pass


def test_a_config_and_arguments_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, inputs wait in host memory; here the CPU plays one."""
    saved = []
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda pin_memory: saved.append(1) or nullcontext())
    monkeypatch.setattr(type(checkpointing.get_accelerator()), "device_name", lambda self: "cuda")
    file = tmp_path / "ds_config.json"
    file.write_text(
        json.dumps(BASE | {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4}})
    )
    for given, expected in (({}, 1), ({"checkpoint_in_cpu": False}, 1), ({"checkpoint_in_cpu": True}, 2)):
        checkpointing.configure(None, str(file) if given != {"checkpoint_in_cpu": True} else None, **given)
        x = torch.ones(3, requires_grad=True)
        checkpointing.checkpoint(torch.sin, x).sum().backward()
        assert len(saved) == expected and checkpointing.is_configured()


@pytest.mark.parametrize("block", [{"profile": None}, {"profile": "Auto", "__comment": "off"}, None])
def test_a_config_that_leaves_it_open(block: dict[str, Any] | None) -> None:
    checkpointing.configure(None, BASE | {"activation_checkpointing": block})


def test_what_divides_activations_is_taken() -> None:
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3)
    checkpointing.partition_activations_in_checkpoint(True)
    checkpointing.set_num_layers(3)
    checkpointing.reset()
    with pytest.raises(ConfigError, match="profile"):
        checkpointing.configure(None, BASE | {"activation_checkpointing": {"profile": "perhaps"}})
