"""The life of PEFT's adapters: several of them, switched, added, deleted, merged, in checkpoints. As in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.errors import ModelError
from tests.exactness.lockstep import everything_on_nvme

peft = pytest.importorskip("peft")


def _model(*adapters: str, **options: Any) -> Any:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, **options)
    model = peft.get_peft_model(base, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    return model


def _of(model: Any, *adapters: str) -> list[nn.Parameter]:
    return [p for fqn, p in model.named_parameters() if any(f".{name}." in fqn for name in adapters)]


def _step(model: Any, optimizer: Any, number: int, *, is_plain: bool = False) -> torch.Tensor:
    """On each rank with a batch of its own: plain torch averages gradients as the engine does."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(num_ranks * number + rank))
    loss = model(inputs).square().mean()
    loss.backward()
    for gradient in (p.grad for p in model.parameters() if p.grad is not None and is_plain and num_ranks > 1):
        dist.all_reduce(gradient)
        gradient.div_(num_ranks)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class _Both:
    """A model with its engine, and the same one in plain torch."""

    def __init__(
        self, directory: Path, model: Any, members: Callable[[Any], list[nn.Parameter]], **changes: Any
    ) -> None:
        self.models = (model, copy.deepcopy(model))
        self.optimizers = [torch.optim.AdamW(members(each), lr=1e-2) for each in self.models]
        config = everything_on_nvme(directory, {"optimizer": None, **changes})
        self.engine, *_ = infinity.initialize(model=model, optimizer=self.optimizers[0], config=config)
        self.number = 0

    def step(self) -> None:
        found = _step(self.models[0], self.optimizers[0], self.number)
        expected = _step(self.models[1], self.optimizers[1], self.number, is_plain=True)
        assert torch.equal(found, expected)
        self.number += 1

    def change(self, change: Callable[[Any, Any], Any]) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            torch.manual_seed(self.number)
            change(model, optimizer)

    def require_equal(self) -> None:
        weights, expected = (model.state_dict() for model in self.models)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
        states, others = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        assert states.keys() == others.keys()
        for key, entry in others.items():
            for name, value in entry.items():
                assert torch.equal(states[key][name], value), (key, name)


def _everything(model: Any) -> list[nn.Parameter]:
    return list(model.parameters())


@pytest.mark.parametrize("members", [_everything, lambda model: _of(model, "one", "two")])
def test_adapters_that_are_switched(members: Any, tmp_path: Path) -> None:
    both = _Both(tmp_path, _model("one", "two"), members)
    with both.engine:
        for name in ("one", "two", "one", "two"):
            both.change(lambda model, _, name=name: model.set_adapter(name))
            both.step()
            both.step()
        both.require_equal()


def test_an_adapter_that_comes_into_a_group_when_it_is_switched_on(tmp_path: Path) -> None:
    both = _Both(tmp_path, _model("one", "two"), lambda model: _of(model, "one"))
    with both.engine:
        both.step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.change(lambda model, optimizer: optimizer.add_param_group({"params": _of(model, "two"), "lr": 1e-3}))
        both.step()
        both.change(lambda model, _: model.set_adapter("one"))
        both.step()
        both.require_equal()


def test_an_adapter_that_is_added_after_initialize(tmp_path: Path) -> None:
    both = _Both(tmp_path, _model("one"), lambda model: _of(model, "one"))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    with both.engine:
        both.step()
        both.change(lambda model, _: model.add_adapter("two", config))
        both.change(lambda model, _: model.set_adapter("two"))
        both.change(lambda model, optimizer: optimizer.add_param_group({"params": _of(model, "two")}))
        both.step()
        both.change(lambda model, _: model.set_adapter("one"))
        both.step()
        both.require_equal()


def test_adapters_that_are_merged_and_deleted(tmp_path: Path) -> None:
    both = _Both(tmp_path, _model("one", "two"), lambda model: _of(model, "one", "two"))
    with both.engine:
        both.step()
        both.change(lambda model, _: model.merge_adapter(["one"]))
        both.change(lambda model, _: model.unmerge_adapter())
        both.step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.step()
        both.change(lambda model, _: model.delete_adapter("one"))
        both.step()
        weights, expected = (model.state_dict() for model in both.models)
        assert weights.keys() == expected.keys() and all(torch.equal(weights[n], expected[n]) for n in expected)


def test_adapters_that_are_merged_and_unloaded(tmp_path: Path) -> None:
    both = _Both(tmp_path, _model("one", "two"), _everything)
    with both.engine:
        both.step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.step()
        weights, expected = (model.merge_and_unload(adapter_names=["one", "two"]) for model in both.models)
        for name, value in expected.state_dict().items():
            assert torch.equal(weights.state_dict()[name], value), name
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.equal(weights(inputs), expected(inputs))


def test_a_checkpoint_that_is_loaded_while_another_adapter_is_active(tmp_path: Path) -> None:
    both = _Both(tmp_path / "first", _model("one", "two"), _everything)
    with both.engine:
        both.step()
        both.change(lambda model, _: model.set_adapter("two"))
        both.step()
        both.engine.save_checkpoint(str(tmp_path / "saved"))
    other = _model("one", "two")
    other.set_adapter("two")
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    config = everything_on_nvme(tmp_path / "second", {"optimizer": None})
    engine, *_ = infinity.initialize(model=other, optimizer=again, config=config)
    with engine:
        engine.load_checkpoint(str(tmp_path / "saved"))
        both.models, both.optimizers = (other, both.models[1]), [again, both.optimizers[1]]
        both.change(lambda model, _: model.set_adapter("one"))
        both.step()
        both.require_equal()


def test_states_of_an_adapter_in_no_group_are_not_dropped_by_a_load(tmp_path: Path) -> None:
    both = _Both(tmp_path / "first", _model("one", "two"), lambda model: _of(model, "one", "two"))
    with both.engine:
        both.step()
        both.engine.save_checkpoint(str(tmp_path / "saved"))
    other = _model("one", "two")
    other.set_adapter("two")
    config = everything_on_nvme(tmp_path / "second", {"optimizer": None})
    optimizer = torch.optim.AdamW(_of(other, "two"), lr=1e-2)
    engine, *_ = infinity.initialize(model=other, optimizer=optimizer, config=config)
    with engine:
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(ValueError, match=r"lora_A\.one\.weight.*in none of this one"):
            engine.load_checkpoint(str(tmp_path / "saved"))
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        _step(other, optimizer, 0)


def test_a_base_weight_that_was_trained_keeps_its_states_when_an_adapter_comes(tmp_path: Path) -> None:
    def members(model: Any) -> list[nn.Parameter]:
        bias = model.base_model.model[2].base_layer.bias
        bias.requires_grad_(True)
        return [*_of(model, "one"), bias]

    both = _Both(tmp_path, _model("one", "two"), members)
    with both.engine:
        both.step()
        both.change(lambda model, _: model.base_model.model[2].base_layer.bias.requires_grad_(False))
        both.change(lambda model, _: model.set_adapter("two"))
        both.change(lambda model, optimizer: optimizer.add_param_group({"params": _of(model, "two")}))
        both.step()
        both.change(lambda model, _: model.base_model.model[2].base_layer.bias.requires_grad_(True))
        both.step()
        both.require_equal()


def test_a_group_that_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    both = _Both(tmp_path, _model("one", "two", "three"), lambda model: _of(model, "one", "two"))
    with both.engine:
        both.step()
        both.models[0].delete_adapter("two")  # its parameters have room
        with pytest.raises(ModelError, match="taken out of the model"):
            both.optimizers[0].add_param_group({"params": _of(both.models[0], "three")})
        both.models[1].delete_adapter("two")
        both.step()
        assert len(both.optimizers[0].param_groups) == 1
        weights, expected = (model.state_dict() for model in both.models)
        assert weights.keys() == expected.keys() and all(torch.equal(weights[n], expected[n]) for n in expected)
