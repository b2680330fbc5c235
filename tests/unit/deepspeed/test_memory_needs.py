"""DeepSpeed's tables of memory."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

_ZERO3 = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 2 nodes, 8 GPUs per node.
SW: Model with 2800M total params, 65M largest layer params.
  per CPU  |  per GPU |   Options
   35.20GB |   0.24GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  125.17GB |   0.24GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   31.29GB |   0.57GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  125.17GB |   0.57GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    2.91GB |   3.18GB | offload_param=none, offload_optimizer=none, zero_init=1
  125.17GB |   3.18GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
_ZERO2 = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 3 nodes, 4 GPUs per node.
SW: Model with 134M total params.
  per CPU  |  per GPU |   Options
   12.01GB |   0.25GB | offload_optimizer=cpu
    4.00GB |   0.44GB | offload_optimizer=none
"""
"""What DeepSpeed 0.19.8 prints."""


def test_the_tables_are_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    stage3 = importlib.import_module("infinity.deepspeed.runtime.zero.stage3")
    stage3.estimate_zero3_model_states_mem_needs_all_cold(int(2.8e9), int(6.5e7), 8, 2)
    found = capsys.readouterr().out
    assert found.startswith(_ZERO3) and "infinity plan" in found[len(_ZERO3) :]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(32)))
    zero2 = importlib.import_module("infinity.deepspeed.runtime.zero.stage_1_and_2")
    zero2.estimate_zero2_model_states_mem_needs_all_live(
        model, num_gpus_per_node=4, num_nodes=3, additional_buffer_factor=2
    )
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert "".join(line.rstrip() + "\n" for line in lines[:6]) == _ZERO2
    zero2.estimate_zero2_model_states_mem_needs_all_cold(134_000_000)
    stage3.estimate_zero3_model_states_mem_needs_all_live(model)
    assert "134M total params, 4M largest layer" in capsys.readouterr().out
