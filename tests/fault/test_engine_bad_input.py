"""What cannot be trained is refused by `initialize` before anything is written, with the name, the value and the cure.

After each refusal the model is as it was: an ordinary module with its own values, that plain torch and another engine
can train.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import (
    BudgetTooSmallError,
    ConfigError,
    InfinityError,
    ModelError,
    OptimizerNotPageableError,
    StorageError,
)
from tests.exactness.lockstep import PLAIN, engine_on_nvme, everything_on_nvme, make_batch


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A directory for scratch files that must be empty in the end."""
    directory = tmp_path / "drive"
    directory.mkdir()
    yield directory
    if directory.exists():
        assert os.listdir(directory) == []


def refused(
    error: type[InfinityError],
    *words: str,
    drive: Path,
    changes: dict[str, Any] | None = None,
    config: Any = None,
    model: Any = None,
    arguments: Callable[[Any], dict[str, Any]] = lambda model: {},
) -> InfinityError:
    """`initialize` must raise ``error`` with all ``words`` in its message, and leave model and directory alone."""
    model = PLAIN.make("none") if model is None else model
    config = everything_on_nvme(drive, changes) if config is None else config
    is_module = isinstance(model, nn.Module)
    before = {}
    if is_module:
        before = {fqn: (p, None if p.is_meta else p.detach().clone()) for fqn, p in model.named_parameters()}
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules()) if is_module else 0

    with pytest.raises(error) as raised:
        infinity.initialize(model=model, config=config, **arguments(model))

    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    if drive.exists():
        assert os.listdir(drive) == []
    if is_module:
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
        for fqn, param in model.named_parameters():
            original, value = before[fqn]
            assert param is original
            assert type(param) is type(original)
            if value is not None:
                assert torch.equal(param, value), fqn
    return raised.value


# ---------------------------------------------------------------------------------------------- config


def test_a_data_set_without_a_batch_size(drive: Path) -> None:
    changes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    arguments = {"training_data": [1, 2, 3]}
    refused(ConfigError, "train_micro_batch_size_per_gpu", drive=drive, changes=changes, arguments=lambda _: arguments)


# --------------------------------------------------------------------------------- directories, budget


@pytest.mark.root
def test_directory_is_too_small_for_the_states(drive: Path, small_tmpfs: Callable[[int], Path]) -> None:
    point = small_tmpfs(64 << 10)
    changes = {"zero_optimization": {"offload_optimizer": {"nvme_path": str(point)}}}
    error = refused(StorageError, str(point), drive=drive, changes=changes)
    numbers = [int(word) for word in str(error).replace(";", " ").replace(",", " ").split() if word.isdigit()]
    free = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
    assert free == 64 << 10, "space that was reserved is given back"
    assert free in numbers, f"the free bytes ({free}) are named in: {error}"
    assert any(number > free for number in numbers), f"the needed bytes are named in: {error}"
    assert os.listdir(point) == []


@pytest.mark.deep(but=4)
@pytest.mark.parametrize("tiers", ["nvme", "cpu", "none"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_budget_below_the_minimum(tiers: str, dtype: str, drive: Path) -> None:
    changes: dict[str, Any] = {
        "infinity": {"host_memory_budget": 5000},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"offload_param": {"device": tiers}, "offload_optimizer": {"device": tiers}},
    }
    error = refused(BudgetTooSmallError, "infinity.host_memory_budget", "5000", drive=drive, changes=changes)
    assert isinstance(error, BudgetTooSmallError)
    assert str(error.minimum_bytes) in str(error)
    for budget, is_enough in ((error.minimum_bytes - 1, False), (error.minimum_bytes, True)):
        changes["infinity"]["host_memory_budget"] = budget
        if not is_enough:
            refused(BudgetTooSmallError, str(error.minimum_bytes), drive=drive, changes=changes)
            continue
        engine = engine_on_nvme(drive, PLAIN.make("none"), changes)
        engine.close()


# ----------------------------------------------------------------------------------------------- model


class _Special(nn.Parameter):
    pass


def _with(change: Callable[[Any], object]) -> Callable[[], Any]:
    def make() -> Any:
        model = PLAIN.make("none")
        change(model)
        return model

    return make


def _on_meta() -> Any:
    with torch.device("meta"):
        return PLAIN.make("none")


def _put(module: Any, name: str, value: Any) -> None:
    setattr(module, name, value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_on_meta, ("embedding.weight", "meta", "infinity.load_pretrained(", "infinity.Init")),
        (
            _with(lambda m: _put(m.blocks[1].up, "weight", nn.Parameter(torch.empty(2, 2, device="meta")))),
            ("blocks.1.up.weight",),
        ),
        (_with(lambda m: _put(m.blocks[0].up, "weight", _Special(torch.ones(2)))), ("blocks.0.up.weight", "Special")),
        (_with(lambda m: _put(m, "phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))), ("phase", "complex")),
        (nn.ReLU, ("no parameters",)),
        (dict, ("nn.Module", "dict")),
    ],
)
def test_models_that_cannot_be_trained(make: Callable[[], Any], words: tuple[str, ...], drive: Path) -> None:
    refused(ModelError, *words, drive=drive, model=make())


def test_parameter_that_is_not_initialized(drive: Path) -> None:
    model = PLAIN.make("none")
    model.lazy = nn.LazyLinear(3)
    with pytest.raises(InfinityError, match=r"lazy\.weight"):
        engine_on_nvme(drive, model)


# ------------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize(
    ("groups_of", "words"),
    [
        (lambda params: [{"params": params}, {"params": params[:1]}], ("embedding.weight", "0", "1")),
        (lambda params: [*params, nn.Parameter(torch.ones(3))], ("(3,)",)),
    ],
    ids=["twice", "of another model"],
)
def test_parameters_that_no_group_can_have(
    groups_of: Callable[[Any], Any], words: tuple[str, ...], drive: Path
) -> None:
    def arguments(model: nn.Module) -> dict[str, Any]:
        return {"model_parameters": groups_of(list(model.parameters()))}

    refused(InfinityError, *words, drive=drive, arguments=arguments)


@pytest.mark.parametrize("how", ["instance", "class", "callable"])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.LBFGS(params),
        lambda params: torch.optim.SparseAdam(params),
        lambda params: torch.optim.Adafactor(params),
    ],
    ids=["LBFGS", "SparseAdam", "Adafactor"],
)
def test_an_optimizer_that_cannot_be_paged(make: Callable[[Any], Any], how: str, drive: Path) -> None:
    name = type(make([nn.Parameter(torch.ones(2))])).__name__

    def arguments(model: nn.Module) -> dict[str, Any]:
        if how == "instance":
            return {"optimizer": make(list(model.parameters()))}
        if how == "class":
            return {"optimizer": type(make([nn.Parameter(torch.ones(2))]))}
        return {"optimizer": make}

    random_state = torch.get_rng_state()
    refused(OptimizerNotPageableError, name, drive=drive, arguments=arguments)
    assert torch.equal(torch.get_rng_state(), random_state)


_WRONG_CONFIGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"infinity": {"host_memory_budget": 1}}, "host_memory_budget"),
    ({"infinity": {"update": "in_backward"}, "gradient_clipping": 1.0}, "gradient_clipping"),
    ({"optimizer": {"type": "AdamWW"}}, "AdamWW"),
)
"""One for each place that refuses them; all are in tests/unit."""


def test_a_refused_model_trains_in_plain_torch_and_in_an_engine(drive: Path) -> None:
    model = PLAIN.make("none")
    for changes, word in _WRONG_CONFIGS:
        refused(InfinityError, word, drive=drive, changes=changes, model=model)
    expected = PLAIN.make("none")(**make_batch(0))
    assert torch.equal(model(**make_batch(0)), expected)
    model(**make_batch(0)).backward()
    model.zero_grad()
    with engine_on_nvme(drive, model) as engine:
        assert torch.equal(engine(**make_batch(0)), expected)
