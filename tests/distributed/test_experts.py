"""Mixtures of experts on several ranks, each of which routes to experts of its own: paged one by one, with the bits of
whole layers."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import RankError
from swapper import TransferRecord
from tests.distributed.common import Values, require_same, weights_of
from tests.exactness import mixtures
from tests.exactness.families import VOCABULARY
from tests.exactness.lockstep import BF16, everything_on_nvme
from tests.exactness.paged import least_budget
from tests.internals import DividedWeights
from tests.ranks import on_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of PEFT


_BLOCK_BYTES = 250_000
"""Enough for a block with all of its experts."""


def _model(family: str, use: str, implementation: str = "grouped_mm") -> Any:
    """``use``: ``"full"`` trains everything, ``"frozen"`` all but the experts, ``"adapters"`` LoRA."""
    wrap: Any = {"full": lambda model: model, "frozen": mixtures.frozen, "adapters": mixtures.with_adapters}[use]
    if use == "adapters":
        pytest.importorskip("peft")
    return mixtures.case(family, implementation, wrap).make("none")


def _config(directory: Path, experts: str, stage: int = 3, **changes: Any) -> dict[str, Any]:
    section = {"experts": experts, "staging_buffer_bytes": None}
    changes["infinity"] = section | changes.get("infinity", {})
    config = everything_on_nvme(directory, changes)
    config["zero_optimization"]["stage"] = stage
    return config


def _engine(model: nn.Module, config: dict[str, Any], more_bytes: int = 0) -> Any:
    """With the least memory, so that experts come and go, or more than that."""
    section = config["infinity"]
    if not section["keep_in_memory"]:
        section["host_memory_budget"] = least_budget(model, config) + more_bytes
    return infinity.initialize(model=model, config=config)[0]


def _tokens(rank: int, number: int) -> torch.Tensor:
    """Few, so that ranks route to different experts."""
    return torch.randint(VOCABULARY, (1, 2), generator=torch.Generator().manual_seed(100 * rank + number))


def _loss(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
    return loss


def _train(model: nn.Module, config: dict[str, Any], rank: int, num_steps: int = 3) -> Values:
    """Losses and weights of some steps, with an evaluation in between."""
    found: Values = {}
    # In a recomputation, autograd holds all weights of the block that is computed once more.
    recomputes = config["infinity"].get("activation_checkpointing") or getattr(
        model, "is_gradient_checkpointing", False
    )
    with _engine(model, config, _BLOCK_BYTES if recomputes else 0) as engine:
        cut = [unit for unit in engine._parts.parameter_map.units if "_by_expert" in unit.name]
        assert bool(cut) == (config["infinity"]["experts"] != "whole")
        accumulated = config["gradient_accumulation_steps"]
        for step in range(num_steps):
            for micro_batch in range(accumulated):
                loss = _loss(engine, _tokens(rank, accumulated * step + micro_batch))
                engine.backward(loss)
                engine.step()
                found[f"loss {step} {micro_batch}"] = loss.detach()
            with torch.no_grad():
                found[f"evaluated {step}"] = _loss(engine, _tokens(rank, 50 + step))
        return found | weights_of(engine)


# ---------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.deep(but=2)
@pytest.mark.parametrize(
    ("use", "choice", "num", "changes"),
    [
        ("adapters", "auto", 2, {}),
        ("full", "by_expert", 2, {}),
        ("frozen", "auto", 2, {"gradient_accumulation_steps": 2}),
        ("frozen", "auto", 3, BF16),
        ("frozen", "auto", 2, {"infinity": {"prefetch": False}}),
        ("frozen", "auto", 2, {"infinity": {"activation_checkpointing": True}}),
        ("frozen", "auto", 2, {"infinity": {"keep_in_memory": True, "host_memory_budget": "1600KiB"}}),
        ("full", "by_expert", 3, BF16),
        ("full", "by_expert", 2, {"gradient_accumulation_steps": 2}),
        ("full", "by_expert", 2, {"infinity": {"activation_checkpointing": True}}),
        ("full", "by_expert", 2, {"infinity": {"update": "in_backward"}}),
    ],
)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@on_ranks()
def test_ranks_with_other_experts_train_as_with_whole_layers(
    rank: int, use: str, choice: str, num: int, changes: dict[str, Any], implementation: str, tmp_path: Path
) -> None:
    found = [
        _train(_model("qwen3_moe", use, implementation), _config(tmp_path, experts, **copy.deepcopy(changes)), rank)
        for experts in (choice, "whole")
    ]
    require_same(found[0], found[1])


@pytest.mark.deep
@pytest.mark.parametrize("family", [family for family in mixtures.FAMILIES if family != "qwen3_moe"])
@pytest.mark.parametrize(("use", "choice"), [("frozen", "auto"), ("full", "by_expert")])
@on_ranks(2)
def test_other_mixtures_do_as_well(rank: int, family: str, use: str, choice: str, tmp_path: Path) -> None:
    found = [_train(_model(family, use), _config(tmp_path, each), rank, 2) for each in (choice, "whole")]
    require_same(found[0], found[1])


@pytest.mark.deep
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize(("use", "choice"), [("adapters", "auto"), ("full", "by_expert")])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # in evaluation
@on_ranks(2)
def test_routers_choose_once_more_in_a_checkpoint(
    rank: int, use: str, choice: str, implementation: str, use_reentrant: bool, tmp_path: Path
) -> None:
    """Which leaves a recomputed forward as soon as backward has all that it needs."""
    found = []
    for experts in (choice, "whole"):
        model = _model("qwen3_moe", use, implementation)
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": use_reentrant})
        if use == "adapters" or use_reentrant:
            model.enable_input_require_grads()
        found.append(_train(model, _config(tmp_path, experts), rank))
    require_same(found[0], found[1])


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("num", [2, 3])
@on_ranks()
def test_experts_that_no_rank_has_tokens_for_are_left_alone(
    rank: int, implementation: str, num: int, tmp_path: Path
) -> None:
    """As in stage 2, where each rank has all weights, and pages them for itself."""
    found = [
        _train(_model("qwen3_moe", "full", implementation), _config(tmp_path, "touched_only", stage), rank)
        for stage in (2, 3)
    ]
    require_same(found[1], found[0])


@pytest.mark.deep
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("use", "choice"), [("adapters", "auto"), ("full", "by_expert")])
@on_ranks(2)
def test_ranks_that_have_all_weights_page_their_own_experts(
    rank: int, use: str, choice: str, stage: int, tmp_path: Path
) -> None:
    found = [_train(_model("qwen3_moe", use), _config(tmp_path, experts, stage), rank) for experts in (choice, "whole")]
    require_same(found[0], found[1])


@pytest.mark.deep
@pytest.mark.parametrize(("use", "choice"), [("frozen", "auto"), ("full", "by_expert")])
@on_ranks(2)
def test_micro_batches_that_share_each_layer(rank: int, use: str, choice: str, tmp_path: Path) -> None:
    found = []
    for experts in (choice, "whole"):
        changes = {"gradient_accumulation_steps": 2, "infinity": {"schedule": "vertical"}}
        with _engine(_model("qwen3_moe", use), _config(tmp_path, experts, **changes)) as engine:
            losses = {}
            for step in range(2):
                tokens = [_tokens(rank, 2 * step + number) for number in range(2)]
                losses[f"loss {step}"] = engine.train_batch(iter([{"input_ids": t, "labels": t} for t in tokens]))
            found.append(losses | weights_of(engine))
    require_same(found[0], found[1])


# --------------------------------------------------------------------------------------------------------------- bytes


@on_ranks(2)
def test_ranks_read_their_shards_of_the_experts_that_any_of_them_needs(rank: int, tmp_path: Path) -> None:
    fetched: list[str] = []
    fetch = DividedWeights.fetch

    def noted(self: DividedWeights, unit: Any, **options: Any) -> Any:
        fetched.append(unit.name)
        return fetch(self, unit, **options)

    DividedWeights.fetch = noted  # type: ignore[method-assign]  # in this process, which ends soon
    read: Counter[str] = Counter()

    def note(record: TransferRecord) -> None:
        if "_by_expert" in record.extent_name and record.direction.name == "READ":
            read["bytes"] += record.num_bytes

    torch.manual_seed(0)
    model = mixtures.frozen(mixtures.make("qwen3_moe", num_hidden_layers=5, num_experts=16))
    with _engine(model, _config(tmp_path, "auto"), 100_000) as engine:
        num_bytes = {unit.name: unit.num_bytes for unit in engine._parts.parameter_map.units}
        routed = mixtures.watch_routing(engine.module)
        engine._parts.storage.observe(note)
        for step in range(3):
            fetched.clear()
            routed.clear()
            read.clear()
            engine.backward(_loss(engine, _tokens(rank, step)))
            engine.step()
            experts = _check_fetched(fetched, routed)
            of_ranks = torch.tensor(read["bytes"])
            torch.distributed.all_reduce(of_ranks)
            assert of_ranks == sum(num_bytes[name] for name in experts)


def _check_fetched(fetched: list[str], routed: set[str]) -> list[str]:
    """All ranks have fetched the same, in the same order: experts that any of them needs, and no others."""
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, (fetched, routed))
    assert all(each == fetched for each, _ in of_ranks)
    needed = set[str]().union(*(each for _, each in of_ranks))
    experts = [name for name in fetched if "_by_expert" in name]
    assert set(experts) <= needed
    assert needed > routed
    assert len(experts) <= 2 * len(needed)  # in forward and in backward
    return experts


class _OfRank(nn.Module):
    """Each rank uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[torch.distributed.get_rank()](x)
        return y.square().mean()


@on_ranks(2)
def test_a_list_of_which_ranks_use_different_modules_is_to_be_named_as_a_unit(rank: int, tmp_path: Path) -> None:
    losses: Values = {}
    for stage, units in ((0, []), (3, ["layers"]), (3, [])):
        torch.manual_seed(0)
        engine = infinity.initialize(
            model=_OfRank(), config=_config(tmp_path, "auto", stage, infinity={"units": units})
        )[0]
        if stage == 3 and not units:  # the last, because ranks part here
            with pytest.raises(RankError, match=r"name the list in infinity\.units"):
                engine(torch.ones(1, 8))
            return
        with engine:
            for step in range(3):
                loss = engine(torch.ones(1, 8))
                engine.backward(loss)
                engine.step()
                assert torch.equal(losses.setdefault(f"loss {step}", loss.detach()), loss)
