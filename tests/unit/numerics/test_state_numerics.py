"""A language model learns from text as well with small optimizer states as with fp32 ones.

[Note: the tolerance] A byte-level Llama begins with weights that are too large, so that gradients, and with them the second
moments, fall to a sixth in the first steps and the rest of the job depends on how well these follow. Plain torch with fp32
states ends with a loss of about 2.4 and a standard deviation of 0.021 over seeds of the model (0.058 between the best and
the worst of five). How states are stored may make a difference of at most a fifth of that deviation to one and the same seed.
It makes one of 0.0003 (bf16) and 0.001 (int8). Rounded to nearest it would be 0.012 with either, and with four bits 0.021.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train import RandomWindows, Size, build_model, read_text

import infinity
from tests.exactness.lockstep import everything_on_nvme

_STEPS, _BATCH, _SEQ_LEN, _WARM_UP = 600, 8, 32, 20
_LR, _BETAS = 3e-3, (0.9, 0.998)
_SIZE = Size(32, 1, 64, 4, 4)
_TOLERANCE = 0.004


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = build_model(_SIZE, _SEQ_LEN, torch.float32, "none")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)
    return model


@functools.cache
def _data() -> RandomWindows:
    return RandomWindows(read_text(None, 2_000_000), _SEQ_LEN, _STEPS * _BATCH, seed=0)


def _batches(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, torch.Tensor]]:
    """One for each step, after the learning rate is set for it."""
    data = _data()
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _LR * min(1.0, (step + 1) / _WARM_UP)
        tokens = torch.stack([data[step * _BATCH + index]["input_ids"] for index in range(_BATCH)])
        yield {"input_ids": tokens, "labels": tokens}


def _plain(change_state: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[float]:
    """Losses in plain torch; ``change_state`` says what becomes of each moment after a step."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=_BETAS, weight_decay=0.01, fused=True)
    losses = []
    for batch in _batches(optimizer):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for state in optimizer.state.values() if change_state is not None else ():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(change_state(state[name]))
    return losses


def _paged(directory: Path, state_dtype: str) -> list[float]:
    changes: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": _BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": _LR, "betas": list(_BETAS), "weight_decay": 0.01}},
        "infinity": {"state_dtype": state_dtype, "staging_buffer_bytes": None},
    }
    engine, optimizer, *_ = infinity.initialize(model=_model(), config=everything_on_nvme(directory, changes))
    losses = []
    with engine:
        for batch in _batches(optimizer):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def _distance(losses: list[float], others: list[float]) -> float:
    """The largest difference between the curves, of means over a tenth of the job, after the warm-up of the moments."""
    width = _STEPS // 10
    means = [
        [statistics.fmean(curve[start : start + width]) for start in range(_STEPS // 2, _STEPS, width)]
        for curve in (losses, others)
    ]
    return max(abs(one - other) for one, other in zip(*means, strict=True))


@pytest.mark.deep
def test_the_loss_is_that_with_fp32_states(tmp_path: Path) -> None:
    with_fp32_states = _plain()
    for state_dtype in ("bf16", "int8"):
        losses = _paged(tmp_path, state_dtype)
        assert losses[-1] < losses[0] / 2, "it learns"
        assert losses != with_fp32_states
        assert _distance(losses, with_fp32_states) < _TOLERANCE, state_dtype
    rounded = _plain(lambda state: state.bfloat16().float())
    assert _distance(rounded, with_fp32_states) > 2 * _TOLERANCE, "rounding to nearest would be found"
