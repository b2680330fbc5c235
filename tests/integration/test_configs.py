"""The ready-made configs train as they stand: only the directory of the drive is put in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.exactness.lockstep import PLAIN, make_batch
from tests.exactness.paged import paged_snapshot
from tests.exactness.record import Record, require_equal
from tests.exactness.reference import PlainTorch

_CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.json"))


def test_there_are_configs_and_each_has_its_line_in_the_readme() -> None:
    assert len(_CONFIGS) >= 4
    readme = (_CONFIGS[0].parent / "README.md").read_text()
    for path in _CONFIGS:
        assert path.name in readme


def _with_directory(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {
            key: directory if key == "nvme_path" else _with_directory(inner, directory) for key, inner in value.items()
        }
    return value


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_config_trains_to_the_bits_of_plain_torch(path: Path, tmp_path: Path) -> None:
    config = _with_directory(json.loads(path.read_text()), str(tmp_path))
    engine, optimizer, _, _ = infinity.initialize(model=PLAIN.make("none"), config=config)
    group = optimizer.param_groups[0]
    dtype = next(engine.module.parameters()).dtype
    settings = {key: value for key, value in group.items() if key in ("lr", "betas", "eps", "weight_decay")}
    reference = PlainTorch(
        PLAIN.make("none"),
        lambda named: torch.optim.AdamW(named.values(), **settings, fused=True),
        compute_dtype=dtype,
        num_micro_batches=engine.gradient_accumulation_steps(),
        max_norm=engine.config.gradient_clipping,
    )
    expected, actual = Record(), Record()
    with engine:
        for step in range(3):
            reference.param_groups[0]["lr"] = group["lr"]
            for micro_batch in range(reference.num_micro_batches):
                batch = make_batch(step, micro_batch, dtype=dtype)
                wanted = reference.forward(batch)
                reference.backward(wanted)
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
                expected.note(f"loss {step}.{micro_batch}", wanted)
                actual.note(f"loss {step}.{micro_batch}", loss)
            reference.step()
        expected.final, actual.final = reference.snapshot(), paged_snapshot(engine, optimizer)
        require_equal(expected, actual, context=path.name)
