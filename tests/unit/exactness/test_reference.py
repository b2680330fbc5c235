"""The reference is plain torch: where ordinary loops exist, it equals them; elsewhere it keeps its own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.exactness.case import Case, Draw, loss_of
from tests.exactness.driver import reference_trainer, train
from tests.exactness.grid import Row
from tests.exactness.optimizers import MAX_NORM, decay_learning_rates, torch_optimizer
from tests.exactness.record import Difference, Record, Snapshot, require_equal
from tests.exactness.shapes import SHAPES

_BY_NAME = {case.name: case for case in SHAPES}
_CPU = torch.device("cpu")


def _ordinary(case: Case, row: Row) -> tuple[list[torch.Tensor], torch.nn.Module, Any]:
    """What anybody would write for fp32: the optimizer on the model's own parameters."""
    model = case.make(row.checkpointing)
    optimizer = torch_optimizer(row.optimizer, {n: p for n, p in model.named_parameters() if p.requires_grad})
    seen = []
    torch.manual_seed(4)
    for step in range(4):
        for micro_batch in range(row.accumulation):
            loss = loss_of(model(**case.batch(Draw(step, micro_batch, torch.float32, _CPU))))
            seen.append(loss.detach().clone())
            (loss / row.accumulation).backward()
        if row.clipping:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        decay_learning_rates(optimizer.param_groups)
    return seen, model, optimizer


@pytest.mark.deep(but=6)
@pytest.mark.parametrize("name", ["plain", "tied_weights", "experts", "transposed", "lora", "scalars", "dropout"])
@pytest.mark.parametrize(
    "row",
    [Row(), Row(clipping=True, optimizer="groups"), Row(accumulation=3, clipping=True, optimizer="instance")],
    ids=lambda row: row.name,
)
def test_fp32_equals_the_ordinary_loop(name: str, row: Row) -> None:
    case = _BY_NAME[name]
    seen, model, optimizer = _ordinary(case, row)
    trainer = reference_trainer(case, row)

    record = train(_WithoutEvaluation(trainer), case.batch, dtype=torch.float32, accumulation=row.accumulation)

    wanted = [value for what, value in record.events if what.startswith("loss") or (row.clipping and "norm" in what)]
    assert len(wanted) == len(seen)
    assert all(torch.equal(a, b) for a, b in zip(wanted, seen, strict=True))
    for fqn, param in model.named_parameters():
        assert torch.equal(param, dict(trainer.model.named_parameters())[fqn]), fqn
        if not param.requires_grad:
            continue
        assert torch.equal(param, trainer.main[fqn]), fqn
        expected_state = optimizer.state.get(param, {})
        actual_state = trainer.optimizer.state.get(trainer.main[fqn], {})
        assert expected_state.keys() == actual_state.keys()
        assert all(torch.equal(expected_state[key], actual_state[key]) for key in expected_state)


class _WithoutEvaluation:
    """Leaves out what the ordinary loop does not do and that draws random numbers or moves buffers in some models."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def evaluate(self, batch: dict[str, Any]) -> torch.Tensor:
        return torch.zeros(())


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

    class Drawing(_WithoutEvaluation):
        def step(self) -> torch.Tensor:
            torch.rand(1)
            return self._inner.step()

    settings: dict[str, Any] = {"dtype": torch.float32, "accumulation": 1}
    expected = train(_WithoutEvaluation(reference_trainer(case, Row())), case.batch, **settings)
    with pytest.raises(Difference, match="next random number"):
        require_equal(expected, train(Drawing(reference_trainer(case, Row())), case.batch, **settings))
