"""``infinity.tile_above``: layers larger than the budget are used in tiles, and nobody but the budget notices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import infinity
from infinity.errors import BudgetTooSmallError, ModelError
from tests.exactness import families
from tests.exactness.lockstep import BF16, engine_on_nvme, everything_on_nvme

_VOCABULARY, _WIDTH = 640, 64
_TILED: dict[str, Any] = {"infinity": {"tile_above": "32KiB"}}


class _Model(nn.Module):
    """Tied embeddings, a block with layers that are too large as well, and one layer that is not."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 256), nn.GELU(), nn.Linear(256, _WIDTH)) for _ in range(2)
        )
        self.small = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.small(x)).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, tokens.flatten())


def _tokens(number: int) -> Tensor:
    return torch.randint(_VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(number))


def _engine(directory: Path, changes: dict[str, Any], model: nn.Module | None = None) -> Any:
    config = everything_on_nvme(directory, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return infinity.initialize(model=model or _Model(), config=config)[0]


def _train(engine: Any, start: int = 0, stop: int = 3) -> list[Tensor]:
    losses = []
    for number in range(start, stop):
        loss = engine(_tokens(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return losses


def _close(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, BF16, {"gradient_clipping": 0.1}, {"gradient_accumulation_steps": 2}])
def test_a_training_is_that_of_whole_layers_but_for_last_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    with _engine(tmp_path, changes) as whole, _engine(tmp_path, {**changes, **_TILED}) as tiled:
        expected, losses = _train(whole, stop=2), _train(tiled, stop=2)
        assert torch.equal(expected[0], losses[0])  # before any gradient
        torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.deep
def test_frozen_and_tiled_layers_give_the_very_bits(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = _Model(is_tied=False)
        made.requires_grad_(False)
        made.head.requires_grad_(True)
        return made

    with _engine(tmp_path, {}, model()) as whole, _engine(tmp_path, _TILED, model()) as tiled:
        assert torch.equal(torch.stack(_train(whole)), torch.stack(_train(tiled)))
        for name, value in whole.module.state_dict().items():
            assert torch.equal(value, tiled.module.state_dict()[name]), name


# -------------------------------------------------------------------------------------------------------------- budget


def _least(changes: dict[str, Any]) -> tuple[int, str]:
    tight = {
        **changes,
        "infinity": {**changes.get("infinity", {}), "host_memory_budget": 1, "staging_buffer_bytes": None},
    }
    with pytest.raises(BudgetTooSmallError) as refused:
        _engine(Path("/tmp"), tight)
    return refused.value.minimum_bytes, str(refused.value)


def test_a_layer_larger_than_the_budget_trains(tmp_path: Path) -> None:
    whole, message = _least({})
    assert "infinity.tile_above" in message and "embed.weight" in message
    tiles = {"tile_above": "16KiB", "staging_buffer_bytes": None}
    least, _ = _least({"infinity": tiles})
    assert least < whole // 2
    with _engine(tmp_path, {"infinity": {**tiles, "host_memory_budget": least}}) as engine:
        _close(_train(engine), _train(_engine(tmp_path, {})))


# --------------------------------------------------------------------------------------------------- names and shapes


@pytest.mark.deep
@pytest.mark.parametrize("changes", [{}, BF16])
def test_state_dicts_go_to_and_fro(changes: dict[str, Any], tmp_path: Path) -> None:
    with _engine(tmp_path, changes) as whole, _engine(tmp_path, {**changes, **_TILED}) as tiled:
        for source, target in ((whole, tiled), (tiled, whole)):
            _train(source, stop=1)
            model, optimizer = source.module.state_dict(), source.optimizer.state_dict()
            target.optimizer.load_state_dict(optimizer)
            target.module.load_state_dict(model)
            others = target.module.state_dict()
            assert list(model) == list(others)
            assert all(torch.equal(model[name], others[name]) for name in model)
            assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()
            states, same = optimizer["state"], target.optimizer.state_dict()["state"]
            assert states.keys() == same.keys()
            for key, entry in states.items():
                for name, value in dict(entry).items():
                    if isinstance(value, Tensor):
                        assert torch.equal(value, same[key][name]), (key, name)


def test_a_state_dict_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    with _engine(tmp_path, _TILED) as engine:
        state = engine.module.state_dict()
        state["head.weight"] = state["head.weight"][:5]
        with pytest.raises(RuntimeError, match=r"head\.weight"):
            engine.module.load_state_dict(state)


@pytest.mark.deep
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("names", [("whole", "tiled"), ("tiled", "whole")])
def test_checkpoints_go_to_and_fro(names: tuple[str, str], is_frozen: bool, tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"whole": BF16, "tiled": {**BF16, **_TILED}}

    def model() -> nn.Module:
        made = _Model(is_tied=not is_frozen)
        made.embed.requires_grad_(not is_frozen)
        return made

    with _engine(tmp_path, changes[names[0]], model()) as first:
        _train(first, stop=2)
        first.save_checkpoint(tmp_path / "saved")
        with _engine(tmp_path, changes[names[1]], model()) as second:
            second.load_checkpoint(tmp_path / "saved")
            a, b = first.module.state_dict(), second.module.state_dict()
            assert all(torch.equal(a[name], b[name]) for name in a)
            _close(_train(first, 2, 4), _train(second, 2, 4))
        with _engine(tmp_path, changes[names[0]], model()) as third:
            third.load_checkpoint(tmp_path / "saved")
            _train(third, 2, 4)
            a, b = first.module.state_dict(), third.module.state_dict()
            assert all(torch.equal(a[name], b[name]) for name in a)


def test_exports_have_whole_weights(tmp_path: Path) -> None:
    def llama() -> Any:
        torch.manual_seed(1)
        return families.llama()

    with (
        _engine(tmp_path, {}, llama()) as whole,
        _engine(tmp_path, {"infinity": {"tile_above": "4KiB"}}, llama()) as tiled,
    ):
        assert any("weight_tiles" in name for name, _ in tiled.module.named_parameters())
        for save in ("save_pretrained", "save_fp32_model", "save_16bit_model"):
            found = []
            for name, engine in (("whole", whole), ("tiled", tiled)):
                getattr(engine, save)(tmp_path / save / name)
                files = sorted((tmp_path / save / name).glob("*.safetensors"))
                found.append({key: value for file in files for key, value in load_file(file).items()})
            assert found[0].keys() == found[1].keys()
            assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


# ----------------------------------------------------------------------------------------------------------- the model


@pytest.mark.deep
def test_afterwards_the_model_is_what_it_was(tmp_path: Path) -> None:
    model = _Model()
    weight, names = model.embed.weight, [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    with engine_on_nvme(tmp_path, model, _TILED, optimizer=optimizer) as engine:
        _train(engine)
        expected = engine.module.state_dict()
    assert [name for name, _ in model.named_parameters()] == names
    assert model.embed.weight is weight is model.head.weight
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    model(_tokens(0)).backward()


def test_a_failed_initialize_leaves_the_model_whole(tmp_path: Path) -> None:
    model = _Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetTooSmallError):
        _engine(tmp_path, {"infinity": {"tile_above": "16KiB", "host_memory_budget": 1}}, model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_needs_the_whole_weight_is_refused_by_name(tmp_path: Path) -> None:
    model = _Model()
    held = model.embed.weight  # before anything was tiled
    with _engine(tmp_path, _TILED, model) as engine:
        weight = engine.module.head.weight
        assert weight is held
        assert weight.shape == (_VOCABULARY, _WIDTH) and weight.dtype == torch.float32
        uses: tuple[Callable[[], Any], ...] = (
            lambda: weight.sum(),
            lambda: weight.data,
            lambda: weight.mul_(2),
            lambda: weight[0],
            lambda: torch.cat([torch.ones(1, _WIDTH), weight]),
            lambda: weight.register_post_accumulate_grad_hook(lambda parameter: None),
            lambda: weight.grad,
            lambda: infinity.GatheredParameters([model.small.weight, weight]).__enter__(),
            lambda: engine.optimizer.state[weight],
        )
        for use in uses:
            with pytest.raises(ModelError, match=r"embed\.weight.*tile_above"):
                use()
        x = torch.randn(2, _WIDTH)
        with torch.no_grad():
            assert nn.functional.linear(x, weight).shape == (2, _VOCABULARY)
            with pytest.raises(IndexError):
                engine.module.embed(torch.tensor([_VOCABULARY]))
