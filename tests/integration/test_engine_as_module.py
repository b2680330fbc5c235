"""The engine is an ``nn.Module`` to whoever asks for one: its content is the model's, under the model's names."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ModelError
from tests.exactness.lockstep import Lockstep, engine_on_nvme
from tests.twins import Twins
from tests.waiting import wait_until


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Lockstep]:
    with Lockstep.start(tmp_path) as pair:
        yield pair


class _Talker(nn.Module):
    """Has attributes that are called as some of the engine's, and methods that the engine does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.optimizer = nn.Linear(4, 4)
        self.register_buffer("global_steps", torch.zeros(1))
        self.greeting = "hello"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.optimizer(self.layer(x)).pow(2).mean()

    def generate(self, n: int) -> torch.Tensor:
        return self(torch.ones(n, 4))


def _talker(directory: Path) -> tuple[_Talker, Any]:
    torch.manual_seed(0)
    model = _Talker()
    engine = engine_on_nvme(directory, model)
    return model, engine


def test_it_is_a_module_with_the_models_content(both: Lockstep) -> None:
    engine, model = both.engine, both.model
    assert isinstance(engine, nn.Module)
    for name in ("named_parameters", "named_buffers", "named_children"):
        expected, found = dict(getattr(model, name)()), dict(getattr(engine, name)())
        assert list(expected) == list(found)
        assert all(expected[key] is found[key] for key in expected)
    assert list(engine.modules()) == [engine, *model.modules()]
    assert all(a is b for a, b in zip(engine.parameters(), model.parameters(), strict=True))
    assert repr(model).splitlines()[1].strip() in repr(engine)
    assert "blocks" in dir(engine)
    assert engine.get_parameter("embedding.weight") is model.get_parameter("embedding.weight")


def test_attributes_come_from_the_model_where_the_engine_has_none(tmp_path: Path) -> None:
    model, engine = _talker(tmp_path)
    with engine:
        assert engine.greeting == "hello"
        assert engine.layer is model.layer
        with torch.no_grad():
            assert torch.equal(engine.generate(2), model.generate(2))
        assert engine.global_steps == 0  # and not the buffer of that name
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        assert engine.global_steps == 1
        assert torch.equal(model.get_buffer("global_steps"), torch.zeros(1))
        assert not hasattr(engine, "no_such_thing")
        with pytest.raises(AttributeError, match="'Engine' object has no attribute 'no_such_thing'"):
            engine.no_such_thing  # noqa: B018
        engine.note = 3
        assert not hasattr(model, "note")


def test_hooks_run_once(both: Lockstep) -> None:
    calls: list[str] = []
    both.engine.register_forward_hook(lambda *_: calls.append("engine"))
    both.model.register_forward_hook(lambda *_: calls.append("model"))
    both.engine.register_state_dict_post_hook(lambda *_: calls.append("state dict"))
    with torch.no_grad():
        both.engine(**both.batch(0))
        both.model(**both.batch(0))
    assert calls == ["model", "engine", "model"]
    both.engine.state_dict()
    assert calls.count("state dict") == 1
    both.engine_step(0)
    both.require_equal()


def test_it_is_not_copied_nor_pickled(both: Lockstep) -> None:
    for refused in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Copy engine\.module"):
            refused(both.engine)


@pytest.mark.deep
def test_a_dropped_engine_is_collected(tmp_path: Path) -> None:
    model, engine = _talker(tmp_path)
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    watch = weakref.ref(engine)
    del engine, model
    wait_until(lambda: gc.collect() >= 0 and watch() is None)  # a thread may have some of it in hand at that moment


def test_a_second_engine_on_the_same_model_is_refused(both: Lockstep, tmp_path: Path) -> None:
    for model in (both.model, both.engine, both.model.get_submodule("blocks")):
        with pytest.raises(ModelError, match="engine_of"):
            engine_on_nvme(tmp_path, model)
        assert infinity.engine_of(model) is both.engine
    outer = nn.ModuleDict({"inner": both.model, "own": nn.Linear(1, 1)})
    with pytest.raises(ModelError, match=r"'inner\..*close\(\)"):
        engine_on_nvme(tmp_path, outer)
    assert infinity.engine_of(outer["own"]) is None
    both.engine_step(0)
    both.require_equal()


def test_an_engine_on_a_submodule(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers, talker = [nn.Linear(4, 4)], _Talker()
    layers.append(copy.deepcopy(layers[0]))
    with Twins(tmp_path, talker, lambda each: torch.optim.AdamW(each.parameters(), lr=0.1)) as twins:
        others = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
        wholes = [nn.Sequential(layer, model) for layer, (model, _) in zip(layers, twins.sides, strict=True)]
        for step in range(3):
            for whole, other, (_, optimizer) in zip(wholes, others, twins.sides, strict=True):
                whole(torch.full((2, 4), float(step + 1))).backward()
                for each in (optimizer, other):
                    each.step()
                    each.zero_grad()
        found, expected = (whole.state_dict() for whole in wholes)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
