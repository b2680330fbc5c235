"""The reference keeps its own rule for bf16, and a comparison sees every bit and every draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.exactness.case import Draw
from tests.exactness.driver import reference_trainer, train
from tests.exactness.grid import Row
from tests.exactness.record import Difference, Record, Snapshot, require_equal
from tests.exactness.shapes import SHAPES

_BY_NAME = {case.name: case for case in SHAPES}
_CPU = torch.device("cpu")


def test_bf16_gradients_are_added_in_fp32() -> None:
    """Adding up in bf16, as p.grad does by itself, gives other bits: the rule matters."""
    case = _BY_NAME["plain"]
    trainer = reference_trainer(case, Row(dtype="bf16", accumulation=3))
    twin = reference_trainer(case, Row(dtype="bf16", accumulation=3))
    for micro_batch in range(3):
        batch = case.batch(Draw(0, micro_batch, torch.bfloat16, _CPU))
        trainer.backward(trainer.forward(batch))
        (twin.forward(batch) / 3).backward()
    main = {fqn: weight.grad for fqn, weight in trainer.main.items()}
    summed = {fqn: param.grad for fqn, param in twin.model.named_parameters()}
    assert all(grad is not None and grad.dtype == torch.float32 for grad in main.values())
    assert any(not torch.equal(main[fqn], summed[fqn].float()) for fqn in main)
    assert all(torch.allclose(main[fqn], summed[fqn].float(), rtol=0.1, atol=1e-2) for fqn in main)


def _record() -> Record:
    entries = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor(1.0)}
    record = Record()
    record.note("loss of step 0", torch.tensor(2.5))
    record.final = Snapshot.copied(
        weights=entries, buffers={}, main_weights=entries, state={"a": {"step": torch.tensor(1.0)}, "b": {}}
    )
    return record


def test_the_first_difference_is_shown() -> None:
    changed = _record()
    changed.final.main_weights["a"][1] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    with pytest.raises(Difference, match=r"plain with row[\s\S]*1 of 6 differ[\s\S]*main_weights\[a\]: 1 of 3.*\[1\]"):
        require_equal(_record(), changed, context="plain with row")


def test_a_draw_from_the_global_generator_is_a_difference() -> None:
    case = _BY_NAME["plain"]
    drawing: Any = reference_trainer(case, Row())
    step = drawing.step
    drawing.step = lambda: (torch.rand(1), step())[1]
    settings: dict[str, Any] = {"dtype": torch.float32, "accumulation": 1}
    expected = train(reference_trainer(case, Row()), case.batch, **settings)
    with pytest.raises(Difference, match="next random number"):
        require_equal(expected, train(drawing, case.batch, **settings))
