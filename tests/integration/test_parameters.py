"""Parameters of a held model, from outside: true, or an error that names them and the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import BudgetTooSmallError, ModelError
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import BF16, Lockstep, everything_on_nvme


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, BF16])
def test_gathered_parameters_show_the_true_weights(changes: dict[str, Any], tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(2):
            both.engine_step(step)
            expected = dict(both.reference.model.named_parameters())
            with infinity.GatheredParameters(both.model.parameters()):
                for fqn, param in both.model.named_parameters():
                    assert torch.equal(param, expected[fqn]), fqn
        one = both.model.blocks[1].up.weight
        with infinity.GatheredParameters(one), infinity.GatheredParameters([one], modifier_rank=None):
            assert torch.equal(one, expected["blocks.1.up.weight"])
        both.engine_step(2)
        both.require_equal()


def test_an_exception_in_a_gathered_block_leaves_training_possible(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        with pytest.raises(KeyError), infinity.GatheredParameters(both.model.parameters()):
            raise KeyError("in the block")
        both.engine_step(1)
        both.require_equal()


def test_gathering_parameters_nobody_holds_does_nothing() -> None:
    param = nn.Parameter(torch.ones(3))
    with infinity.GatheredParameters([param]), torch.no_grad():
        param.add_(1)
    assert torch.equal(param, torch.full((3,), 2.0))


def test_a_gather_beyond_the_budget_names_one_that_is_enough(tmp_path: Path) -> None:
    llama = next(case for case in FAMILIES if case.name == "llama")

    def start(budget_bytes: int) -> infinity.Engine:
        config = everything_on_nvme(tmp_path, {**BF16, "infinity": {"host_memory_budget": budget_bytes}})
        return infinity.initialize(model=llama.make("none"), config=config)[0]

    with pytest.raises(BudgetTooSmallError) as refused:
        start(1)
    with start(refused.value.minimum_bytes) as engine:
        with (
            pytest.raises(BudgetTooSmallError, match="gather fewer parameters at a time") as refused,
            infinity.GatheredParameters(engine.module.parameters()),
        ):
            pass
        assert f"{engine.plan.host_budget_bytes} bytes" in str(refused.value)
        with infinity.GatheredParameters(next(engine.module.parameters())):
            pass
    with start(refused.value.minimum_bytes) as engine, infinity.GatheredParameters(engine.module.parameters()):
        assert all(bool(parameter.isfinite().all()) for parameter in engine.module.parameters())


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("call", ["has_state", "gather_state", "gather_main_weight", "gather"])
def test_a_foreign_tensor_is_refused(call: str, tmp_path: Path) -> None:
    foreign = nn.Parameter(torch.ones(3, 2))
    with Lockstep.start(tmp_path) as both:
        with pytest.raises(ModelError, match=r"\(3, 2\) is no parameter of the engine's model"):
            getattr(both.engine._settled, call)([foreign] if call == "gather" else foreign)
        both.engine_step(0)
        both.require_equal()
