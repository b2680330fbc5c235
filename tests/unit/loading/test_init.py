"""Modules that are built inside `infinity.Init` have the bits that they have without it, and their parameters on drives."""

from __future__ import annotations

import copy
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import skip_init

import infinity
from infinity.device import drive_tensors
from infinity.device.drive_tensors import on_drive
from infinity.errors import ConfigError, StorageError
from infinity.loading import init
from swapper.volumes import mapped_memory
from tests.exactness.lockstep import BF16, IN_MEMORY, everything_on_nvme
from tests.small_transformers import MODELS, SMALL


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter goes to the drive."""
    monkeypatch.setattr(drive_tensors, "LEAST_BYTES", 1)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """One that puts everything on a drive."""
    return everything_on_nvme(tmp_path, BF16)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype and value.stride() == second[name].stride(), name
        assert torch.equal(value, second[name]), name
    ties = [[id(p) for p in module.parameters(recurse=True)] for module in (one, other)]
    assert len(set(ties[0])) == len(set(ties[1]))


def built_both_ways(make: Callable[[], nn.Module], config: dict[str, Any]) -> nn.Module:
    """Build twice from one seed, and compare; the random numbers that come after are the same, too."""
    torch.manual_seed(3)
    plain = make()
    plain_draw = torch.rand(4)
    torch.manual_seed(3)
    with infinity.Init(config=config):
        model = make()
        draw = torch.rand(4)
    mapped_memory.write_out()
    assert torch.equal(draw, plain_draw)
    assert_same(plain, model)
    return model


class ReadsItsWeight(nn.Module):
    """Looks at a weight that it has just made."""

    def __init__(self) -> None:
        super().__init__()
        local = torch.randn(32, 32)
        self.first = nn.Parameter(local)
        local.mul_(2)  # the parameter is changed, too
        self.second = nn.Parameter(torch.randn(32, 32).t())
        with torch.no_grad():
            self.second += self.first / self.first.std()
        self.scale = float(self.second.abs().max())
        self.third = nn.Parameter(torch.full((8, 8), self.scale))
        self.register_buffer("norms", self.first.detach().norm(dim=1))


class AssignsData(nn.Module):
    """Gives a parameter other memory than it came with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.inner.weight.data = torch.randn(8, 8).t()
        self.inner.bias.data = nn.functional.pad(self.inner.bias.data, (0, 4))


def _embedding_of_given_weights() -> nn.Module:
    weights = torch.randn(50, 16)
    made = nn.Embedding(50, 16, _weight=weights)
    weights[0] = 7.0
    return made


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50, bias=False))
    model[1].weight = model[0].weight
    return model


def _applied() -> nn.Module:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.orthogonal_(module.weight)

    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).apply(fill)


def _assigned() -> nn.Module:
    model = nn.Linear(16, 32)
    model.load_state_dict({"weight": torch.randn(32, 16), "bias": torch.randn(32)}, assign=True)
    return model


def _resized() -> nn.Module:
    model = MODELS["llama-tied"]()
    model.resize_token_embeddings(330)
    return model


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedding_given": _embedding_of_given_weights,
    "norms": lambda: nn.Sequential(nn.LayerNorm(16), nn.GroupNorm(2, 16), nn.BatchNorm2d(16), nn.RMSNorm(16)),
    "softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 50]),
    "applied": _applied,
    "assigned": _assigned,
    "reads": ReadsItsWeight,
    "assigns_data": AssignsData,
    "tied": _tied,
    "half": lambda: nn.Sequential(nn.Linear(16, 32), nn.LSTM(16, 16)).to(torch.bfloat16).half(),
    "llama_tied": MODELS["llama-tied"],
    "resized": _resized,
    "from_config_bf16": lambda: transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SMALL), dtype=torch.bfloat16
    ),
}
"""Beside that of tests/integration/test_building.py."""


@pytest.mark.deep(but=9)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _MODELS)
def test_models_have_the_same_bits(name: str, config: dict[str, Any]) -> None:
    model = built_both_ways(_MODELS[name], config)
    assert all(on_drive(parameter) for parameter in model.parameters())


def test_conversions_and_copies_after_the_block_stay_on_the_drive(config: dict[str, Any]) -> None:
    with infinity.Init(config=config):
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    model.bfloat16()
    other = copy.deepcopy(model)
    assert all(on_drive(parameter) for parameter in (*model.parameters(), *other.parameters()))
    assert model[0].weight.dtype == torch.bfloat16
    assert_same(model, other)


def test_torch_is_as_it_was_when_nothing_lies_on_drives(config: dict[str, Any]) -> None:
    gc.collect()  # models of other tests
    with infinity.Init(config=config):
        model: Any = nn.Linear(16, 32)
    assert hasattr(nn.Module._apply, "__wrapped__")
    del model
    nn.Linear(2, 2).double()
    assert not hasattr(nn.Module._apply, "__wrapped__")
    assert not hasattr(nn.Parameter.__deepcopy__, "__wrapped__")


def test_a_default_dtype_is_that_of_the_block(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    plain = nn.Linear(16, 32)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with infinity.Init(config=config, dtype=torch.bfloat16):
        model = nn.Linear(16, 32)
    assert torch.get_default_dtype() == torch.float32
    assert_same(plain, model)


def test_an_existing_module_is_moved(config: dict[str, Any]) -> None:
    model, before = nn.Linear(16, 32), nn.Linear(16, 32)
    before.load_state_dict(model.state_dict())
    parameters = list(model.parameters())
    infinity.deepspeed.zero.Init(module=model, config_dict_or_path=config, remote_device="nvme")
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert all(on_drive(p) for p in parameters)
    assert_same(model, before)
    assert infinity.deepspeed.zero.Init is infinity.Init


def test_blocks_nest_and_end_with_an_exception(config: dict[str, Any]) -> None:
    with infinity.Init(config=config):
        with pytest.raises(KeyError), infinity.Init(enabled=False):
            assert on_drive(nn.Linear(4, 4).weight)
            raise KeyError
        with infinity.Init():
            assert not on_drive(nn.Linear(4, 4).weight)
        with torch.device("meta"):
            assert nn.Linear(4, 4).weight.is_meta
        assert on_drive(skip_init(nn.Linear, 4, 4).weight)
    with pytest.raises(KeyError), infinity.Init(config=config, dtype=torch.float64):
        raise KeyError
    assert torch.get_default_dtype() == torch.float32
    assert not on_drive(nn.Linear(4, 4).weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"remote_device": "tape"}, "remote_device"),
        ({"remote_device": "nvme"}, "needs the config"),
        ({"dtype": torch.int8}, "dtype"),
        ({"module": 3}, "torch.nn.Module"),
        ({"zero_quantized_nontrainable_weights": True}, "quantized"),
        ({"config": {"zero_optimisation": {}}}, "zero_optimisation"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        infinity.Init(**arguments)


@pytest.fixture
def nothing_told() -> None:
    """Messages that come once come again."""
    init._log_once.cache_clear()


@pytest.mark.usefixtures("nothing_told")
def test_without_a_drive_models_are_built_in_memory_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="infinity"):
        for _ in range(2):
            with infinity.deepspeed.zero.Init(
                config={"zero_optimization": {"stage": 3}}, mpu=object(), pin_memory=True
            ):
                assert not on_drive(nn.Linear(4, 4).weight)
    assert caplog.text.count("built in host memory") == 1


def test_a_drive_that_is_too_small_is_named(small_tmpfs: Callable[[int], Path], config: dict[str, Any]) -> None:
    directory = str(small_tmpfs(4 << 20))
    for key in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][key]["nvme_path"] = directory
    with pytest.raises(StorageError, match=f"{directory}.*bytes are needed"), infinity.Init(config=config):
        nn.Linear(1024, 4096)


def test_a_forked_child_does_not_give_the_parents_space_back(config: dict[str, Any]) -> None:
    with infinity.Init(config=config):
        model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    child = os.fork()
    if not child:
        del model
        os._exit(0)
    os.waitpid(child, 0)
    mapped_memory.write_out()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_models_that_are_trained_convert_as_if_there_were_no_init(offload: str, tmp_path: Path) -> None:
    # While a model that lies on drives is alive, conversions of all modules are watched.
    with infinity.Init(config=everything_on_nvme(tmp_path)):
        other = nn.Linear(2048, 256)
    trained = everything_on_nvme(tmp_path, IN_MEMORY if offload == "none" else {})
    engine, *_ = infinity.initialize(model=nn.Linear(4, 4), config=trained)
    with engine, pytest.raises(infinity.errors.InfinityError, match=r"cannot be cast to torch\.float64"):
        engine.module.double()
    assert other.double().weight.dtype == torch.float64


def test_from_pretrained_casts_one_weight_after_the_other(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of transformers would cast all of them before the first one is on its drive."""
    MODELS["llama"]().to(torch.bfloat16).save_pretrained(tmp_path / "weights")
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    with monkeypatch.context() as patches:
        patches.setattr("transformers.core_model_loading.ThreadPoolExecutor", None)
        with infinity.Init(config=config):
            with infinity.Init(config=config):
                pass
            model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32))
