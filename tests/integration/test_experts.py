"""Mixtures of experts in one tensor, paged expert by expert: the bits of plain torch, and only the bytes of routed experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.errors import BudgetTooSmallError, CheckpointError, ConfigError, OptimizerNotPageableError
from tests.exactness import mixtures
from tests.exactness.lockstep import BF16, Lockstep, engine_on_nvme, everything_on_nvme, merged
from tests.exactness.paged import least_budget
from tests.internals import Checkpoint
from tests.quantized import quantize
from tests.twins import Twins

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of PEFT

_MOMENTUM = {"lr": 1e-2, "momentum": 0.9}
_BY_EXPERT: dict[str, Any] = {"infinity": {"experts": "by_expert", "staging_buffer_bytes": None}}


def _train(run: Lockstep, *, trains_experts: bool = True) -> None:
    for step in range(2):
        run.engine_step(step)
    for step in range(2, 4):
        run.batch_step(step)
    if trains_experts:  # nothing goes by the norm, whose last bits may differ: it is one of the experts' norms
        for record in (run.record, run.paged_record):
            record.events = [event for event in record.events if not event[0].startswith("norm")]
    run.require_equal()


# ---------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("family", mixtures.FAMILIES)
@pytest.mark.parametrize("use", ["full", "adapters"])
def test_trains_to_the_bits_of_plain_torch(family: str, use: str, tmp_path: Path) -> None:
    if use == "adapters":
        pytest.importorskip("peft")
    wrap = mixtures.with_adapters if use == "adapters" else lambda model: model
    changes = merged(_BY_EXPERT if use == "full" else {"infinity": {"staging_buffer_bytes": None}}, _ACCUMULATED)
    with Lockstep.start(tmp_path, case=mixtures.case(family, wrap=wrap), changes=changes) as run:
        assert any("_by_expert" in name for name, _ in run.model.named_parameters())
        _train(run, trains_experts=use == "full")


@pytest.mark.deep
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_with_adapters_of_their_own_stay_whole(family: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    case = mixtures.case(family, wrap=mixtures.with_adapters_on_experts)
    with Lockstep.start(
        tmp_path, case=case, changes=merged({"infinity": {"staging_buffer_bytes": None}}, _ACCUMULATED)
    ) as run:
        assert not any("_by_expert" in name for name, _ in run.model.named_parameters())
        _train(run, trains_experts=False)


@pytest.mark.deep
def test_adapters_on_packed_experts(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    case = mixtures.case("qwen3_moe", wrap=mixtures.with_adapters_on_experts)
    plain = quantize(case.make("none"))
    changes = {"frozen_dtype": "nf4", "staging_buffer_bytes": None}
    with Twins(tmp_path, case.make("none"), plain=plain, infinity=changes) as both:
        assert any(unit.layout.slots[-1].spec.packed for unit in both.engine._parts.parameter_map.units)
        for step in range(2):
            both.step(lambda model, step=step: model(**case.batch(_draw(step))).loss)
        both.require_equal()


_ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2}


@pytest.mark.deep
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
@pytest.mark.parametrize("changes", [{}, BF16, {"infinity": {"schedule": "vertical"}}])
def test_trains_with_each_implementation(implementation: str, changes: dict[str, Any], tmp_path: Path) -> None:
    case = mixtures.case("qwen3_moe", implementation)
    with Lockstep.start(tmp_path, case=case, changes=merged(_BY_EXPERT, _ACCUMULATED, changes)) as run:
        _train(run)


@pytest.mark.deep
@pytest.mark.parametrize(
    "changes",
    [
        BF16,
        {"infinity": {"schedule": "vertical"}},
        {"infinity": {"activation_checkpointing": True}},
        {"infinity": {"prefetch": False}},
        {"infinity": {"keep_in_memory": True}},
    ],
)
def test_trains_in_each_way(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = merged(_BY_EXPERT, _ACCUMULATED, changes)
    with Lockstep.start(tmp_path, case=mixtures.case("qwen3_moe"), changes=changes) as run:
        _train(run)


# -------------------------------------------------------------------------------------------------------- touched only


@pytest.mark.deep
def test_only_touched_experts_are_updated(tmp_path: Path) -> None:
    """Beside plain torch with a parameter for each expert, of which those without a token get no gradient."""
    case = mixtures.case("qwen3_moe")
    reference = case.make("none")
    named = dict(reference.named_parameters())
    parts = {
        name: [nn.Parameter(each[None].clone()) for each in p.detach()] for name, p in named.items() if p.dim() == 3
    }
    singles = [part for name, p in named.items() for part in parts.get(name, [p])]
    optimizer = torch.optim.AdamW(singles, lr=1e-2, weight_decay=0.1, fused=True)
    routed = mixtures.watch_routing(reference)
    section = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    changes = {"optimizer": section, "infinity": {"experts": "touched_only", "staging_buffer_bytes": None}}
    with engine_on_nvme(tmp_path, case.make("none"), changes) as engine:
        for step in range(3):
            batch = {key: value[:, :2] for key, value in case.batch(_draw(step)).items()}
            routed.clear()
            expected = reference(**batch).loss
            expected.backward()
            for name, its_parts in parts.items():
                gradient = named[name].grad
                for number, part in enumerate(its_parts):
                    is_touched = f"{name}_by_expert.{number}.weight" in routed
                    part.grad = gradient[number : number + 1].clone() if is_touched else None
            optimizer.step()
            with torch.no_grad():
                for name, parameter in named.items():
                    if name in parts:
                        parameter.copy_(torch.cat([part.detach() for part in parts[name]]))
                    parameter.grad = None
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            assert torch.equal(expected, loss)
        found = engine.module.state_dict()
        for name, value in reference.state_dict().items():
            assert torch.equal(value, found[name]), name


def _draw(step: int) -> Any:
    from tests.exactness.case import Draw

    return Draw(step, 0, torch.float32, torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------------- bytes


def test_only_routed_experts_are_read(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    case = mixtures.case("qwen3_moe", wrap=mixtures.with_adapters)
    with engine_on_nvme(tmp_path, case.make("none"), {"infinity": {"staging_buffer_bytes": None}}) as engine:
        units = {unit.name: unit for unit in engine._parts.parameter_map.units}
        fetched: list[str] = []
        fetch = engine._parts.storage.weights.fetch
        engine._parts.storage.weights.fetch = lambda unit, **options: (
            fetched.append(unit.name),
            fetch(unit, **options),
        )[1]
        routed = mixtures.watch_routing(engine.module)
        for step in range(3):
            routed.clear()
            fetched.clear()
            engine.backward(engine(**case.batch(_draw(step))).loss)
            engine.step()
            experts = {name for name in fetched if "_by_expert" in name}
            assert experts <= routed
            assert 0 < len(routed) < sum("_by_expert" in name for name in units)


def test_checkpointing_names_the_room_that_the_experts_of_a_layer_need(tmp_path: Path) -> None:
    """Not all weights of the model, and not as the fault of user code."""
    changes = merged(_BY_EXPERT, {"infinity": {"activation_checkpointing": True}})
    case = mixtures.case("qwen3_moe")
    budget = least_budget(case.make("none"), everything_on_nvme(tmp_path, changes))
    messages = []
    for _ in range(3):
        changes["infinity"]["host_memory_budget"] = budget
        try:
            with engine_on_nvme(tmp_path, case.make("none"), changes) as engine:
                engine.backward(engine(**case.batch(_draw(0))).loss)
            break
        except BudgetTooSmallError as error:
            budget = error.minimum_bytes
            messages.append(str(error))
    else:
        pytest.fail(f"no budget sufficed: {messages}")
    assert "experts that a layer uses" in messages[0] and "use_reentrant=True" in messages[0]


# ------------------------------------------------------------------------------------------------------ names and files


@pytest.mark.deep
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpoints_and_exports_have_the_names_of_transformers(family: str, frozen: bool, tmp_path: Path) -> None:
    case = mixtures.case(family)

    def engine(choice: str) -> Any:
        model: Any = case.make("none")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and ".experts." in name))
        changes = {"infinity": {"experts": choice, "staging_buffer_bytes": None}}
        return engine_on_nvme(tmp_path, model, changes)

    def train(one: Any, start: int) -> None:
        for step in range(start, start + 2):
            one.backward(one(**case.batch(_draw(step))).loss)
            one.step()

    with engine("by_expert") as cut, engine("whole") as whole:
        for one in (cut, whole):
            train(one, 0)
        cut.save_checkpoint(tmp_path / "saved")
        found = []
        for name, one in (("cut", cut), ("whole", whole)):
            one.save_pretrained(tmp_path / name)
            files = sorted((tmp_path / name).glob("*.safetensors"))
            found.append({key: value for file in files for key, value in load_file(file).items()})
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
        train(whole, 2)
        train(cut, 2)
        expected = whole.module.state_dict()
        states = whole.optimizer.state_dict()
        assert all(torch.equal(value, cut.module.state_dict()[name]) for name, value in expected.items())
        cut.optimizer.load_state_dict(states)
        for choice in ("by_expert", "whole"):
            with engine(choice) as other:
                other.load_checkpoint(tmp_path / "saved")
                train(other, 2)
                assert all(torch.equal(value, other.module.state_dict()[name]) for name, value in expected.items())


@pytest.mark.deep
@pytest.mark.parametrize("optimizer", [{"type": "AdamW", "params": {"lr": 1e-2}}, {"type": "SGD", "params": _MOMENTUM}])
def test_experts_that_are_updated_alone_resume_with_their_own_states(optimizer: dict[str, Any], tmp_path: Path) -> None:
    def engine(choice: str) -> Any:
        return engine_on_nvme(
            tmp_path / "drive",
            mixtures.make("qwen3_moe"),
            {"infinity": {"experts": choice, "staging_buffer_bytes": None}, "optimizer": optimizer},
        )

    def train(engine: Any, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            tokens = torch.randint(40, (1, 2), generator=torch.Generator().manual_seed(seed))  # not all experts get one
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    with engine("touched_only") as first:
        train(first, range(2))
        first.save_checkpoint(tmp_path / "saved")
        expected, weights = train(first, range(2, 5)), {k: v.clone() for k, v in first.module.state_dict().items()}
    with engine("touched_only") as second:
        second.load_checkpoint(tmp_path / "saved")
        assert train(second, range(2, 5)) == expected
        assert all(torch.equal(value, weights[name]) for name, value in second.module.state_dict().items())
    with engine("whole") as other:
        with pytest.raises(
            CheckpointError, match=r"states for each expert, and this one for all .* set infinity\.experts"
        ):
            other.load_checkpoint(tmp_path / "saved")
        other.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)


def test_checkpoints_of_packed_experts_have_their_names(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    case = mixtures.case("qwen3_moe", wrap=mixtures.with_adapters)
    config = everything_on_nvme(
        tmp_path / "drive", {"infinity": {"frozen_dtype": "int8", "staging_buffer_bytes": None}}
    )
    for _ in range(2):
        with infinity.initialize(model=case.make("none"), config=config)[0] as engine:
            if (tmp_path / "saved").exists():
                assert engine.load_checkpoint(tmp_path / "saved")[0] is not None
            engine.save_checkpoint(tmp_path / "saved")
    assert not any("_by_expert" in name for name in Checkpoint.open(tmp_path / "saved").omitted.excluded)


def test_afterwards_the_model_is_what_it_was(tmp_path: Path) -> None:
    model: Any = mixtures.case("qwen3_moe").make("none")
    names, experts = [name for name, _ in model.named_parameters()], model.model.layers[0].mlp.experts.down_proj
    with engine_on_nvme(tmp_path, model, _BY_EXPERT) as engine:
        expected = engine.module.state_dict()
    assert [name for name, _ in model.named_parameters()] == names
    assert model.model.layers[0].mlp.experts.down_proj is experts
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert type(experts) is nn.Parameter


def test_refusals_name_the_cure(tmp_path: Path) -> None:
    config = everything_on_nvme(tmp_path, merged(_BY_EXPERT, {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}))
    with pytest.raises(OptimizerNotPageableError, match=r"infinity\.experts"):
        infinity.initialize(model=mixtures.make("qwen3_moe"), config=config)
    with pytest.raises(ConfigError, match=r"infinity\.experts"):
        config = everything_on_nvme(tmp_path, {"infinity": {"experts": "sparse"}})
        infinity.initialize(model=mixtures.make("qwen3_moe"), config=config)


@pytest.mark.parametrize("choice", ["by_expert", "touched_only"])
def test_experts_with_adapters_of_their_own_cannot_be_paged_one_by_one(choice: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = mixtures.with_adapters_on_experts(mixtures.make("qwen3_moe"))
    with pytest.raises(ConfigError, match=r"mlp\.experts.*target_parameters"):
        engine_on_nvme(tmp_path, model, {"infinity": {"experts": choice, "staging_buffer_bytes": None}})
