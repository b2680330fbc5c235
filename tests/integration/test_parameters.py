"""Parameters of a held model, from outside: true, or an error that names them and the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import AccessError, BudgetTooSmallError, InfinityError, ModelError
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import BF16, Lockstep, everything_on_nvme
from tests.states import state_of


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


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("changes", [{}, BF16, {"gradient_clipping": 0.1}])
def test_modifications_of_gathered_parameters_are_trained_on(changes: dict[str, Any], tmp_path: Path) -> None:
    name = "blocks.1.up.weight"
    with Lockstep.start(tmp_path, changes=changes) as both:
        for step in range(3):
            both.engine_step(step)
            weight = both.model.get_parameter(name)
            with infinity.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.mul_(0.5)
                weight[0] = 0.25
            with torch.no_grad():
                # The modified weight is all there is of it: the main weight follows the model weight.
                modified = both.reference.model.get_parameter(name).mul_(0.5)
                modified[0] = 0.25
                both.reference.main[name].copy_(modified)
        both.engine_step(3)
        snapshot_weight = state_of(both.engine, both.model.get_parameter(name))["weight"]
        if changes != BF16:
            both.require_equal()
        else:
            # Elements whose cast did not change may keep their low bits: halving keeps them too.
            main = both.reference.main[name].detach()
            torch.testing.assert_close(snapshot_weight, main, rtol=2**-8, atol=1e-6)


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


def _reads(param: nn.Parameter) -> dict[str, Any]:
    return {
        "sum": lambda: param.sum(),
        "index": lambda: param[0],
        "clone": lambda: param.detach().clone(),
        "data": lambda: param.data.clone(),
        "numpy": lambda: torch.from_numpy(param.detach().numpy().copy()),
        "tolist": lambda: torch.tensor(param.tolist()),
        "item": lambda: torch.tensor(param.flatten()[0].item()),
        "torch function": lambda: torch.linalg.vector_norm(param),
        "operator": lambda: param + 1,
        "reversed operator": lambda: 1 - param,
        "equal": lambda: torch.tensor(torch.equal(param, torch.zeros(param.shape))),
        "foreach": lambda: torch._foreach_norm([param])[0],
        "stack": lambda: torch.stack([param, param]),
        "to": lambda: param.to(torch.float64),
        "cpu": lambda: param.cpu().clone(),
        "op": lambda: torch.ops.aten.sum(param),
        "iteration": lambda: torch.stack(list(param)),
        "copy_ from": lambda: torch.empty(param.shape).copy_(param),
        "storage": lambda: torch.tensor(list(param.untyped_storage())[4 * param.storage_offset() :][:16]),
        "dlpack": lambda: torch.from_dlpack(param.detach()).clone(),
    }


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("read", _reads(nn.Parameter(torch.ones(1, 1))))
def test_a_read_outside_the_engine_is_true_or_raises_with_the_name(read: str, tmp_path: Path) -> None:
    name = "blocks.1.up.weight"
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        expected = _reads(nn.Parameter(both.reference.model.get_parameter(name).detach().clone()))[read]()
        param = both.model.get_parameter(name)
        assert param.shape == both.reference.model.get_parameter(name).shape
        assert param.requires_grad
        assert param.dtype == torch.float32
        try:
            actual = _reads(param)[read]()
        except AccessError as error:
            assert name in str(error)
            assert "GatheredParameters" in str(error)
        else:
            assert torch.equal(actual, expected)
        both.engine_step(1)
        both.require_equal()


def test_repr_shows_true_values_or_none(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        name = "blocks.1.norm.bias"
        text = repr(both.model.get_parameter(name))
        values = both.reference.model.get_parameter(name)
        assert f"{values[0].item():.4e}"[:6] in text.replace(" ", "") or "0.0000" not in text
        assert repr(both.model)
        both.engine_step(1)
        both.require_equal()


def test_a_pointer_to_a_parameters_memory_is_not_given_away(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        param = both.model.get_parameter("blocks.1.up.weight")
        with pytest.raises(AccessError, match=r"blocks\.1\.up\.weight"):
            param.data_ptr()
        with infinity.GatheredParameters(param):
            assert param.data_ptr() != 0


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("cast", ["half", "double", "bfloat16", "to meta"])
def test_casting_or_moving_a_held_model_counts_or_raises(cast: str, tmp_path: Path) -> None:
    """``nn.Module.to`` assigns to ``param.data``: it must not be lost in silence."""
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        with pytest.raises(InfinityError):
            if cast == "to meta":
                both.model.to("meta")
            else:
                getattr(both.model, cast)()
        both.engine_step(1)
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("move", ["cpu", "float", "to"])
def test_moving_a_held_model_to_where_it_is_changes_nothing(move: str, tmp_path: Path) -> None:
    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        try:
            both.model.to("cpu") if move == "to" else getattr(both.model, move)()
        except InfinityError as error:
            assert "GatheredParameters" in str(error) or "initialize" in str(error)
        both.engine_step(1)
        both.require_equal()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("write", ["data", "copy_", "fill_", "index", "init", "data assigned"])
def test_a_write_outside_the_engine_counts_or_raises(write: str, tmp_path: Path) -> None:
    name = "blocks.1.up.weight"

    def change(param: nn.Parameter) -> None:
        with torch.no_grad():
            if write == "data":
                param.data.fill_(0.5)
            elif write == "copy_":
                param.copy_(torch.full(param.shape, 0.5))
            elif write == "fill_":
                param.fill_(0.5)
            elif write == "index":
                param[0] = 0.5
            elif write == "init":
                nn.init.constant_(param, 0.5)
            else:
                param.data = torch.full(param.shape, 0.5)

    with Lockstep.start(tmp_path) as both:
        both.engine_step(0)
        try:
            change(both.model.get_parameter(name))
        except (AccessError, InfinityError) as error:
            assert name in str(error)
        else:
            change(both.reference.model.get_parameter(name))
            change(both.reference.main[name])
        both.engine_step(1)
        both.require_equal()


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
