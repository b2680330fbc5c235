"""Parameters that are replaced, tied and removed between steps, computed from others, and models called with others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import infinity
from infinity.errors import ModelError, OtherNumbersWarning
from tests.exactness.case import Case
from tests.exactness.lockstep import PLAIN, engine_on_nvme, make_batch
from tests.exactness.shapes.blocks import VOCABULARY, WIDTH, Block, Net, token_batch
from tests.exactness.written import MODES, train
from tests.twins import Side, Twins, config_for, require_same

in_modes = pytest.mark.parametrize("mode", ["smallest", "smallest deferred", "resident"])


def _tie(model: Any) -> list[nn.Parameter]:
    model.head.weight = model.embedding.weight
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return []


def _replace(model: Any) -> list[nn.Parameter]:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone() * 2)
    return [model.head.weight]


def _exchange(model: Any) -> list[nn.Parameter]:
    first, last = model.blocks[0].up, model.blocks[2].up
    first.weight, last.weight = last.weight, first.weight
    return []


def _remove_bias(model: Any) -> list[nn.Parameter]:
    model.blocks[1].up.bias = None
    return []


def _prune(model: Any) -> list[nn.Parameter]:
    prune.l1_unstructured(model.blocks[0].up, "weight", 0.3)
    return []


def _delete_block(model: Any) -> list[nn.Parameter]:
    del model.blocks[1]
    return []


def _insert_block(model: Any) -> list[nn.Parameter]:
    torch.manual_seed(4)
    model.blocks.insert(1, Block())
    return list(model.blocks[1].parameters())


_CHANGES: list[Callable[[Any], list[nn.Parameter]]] = [
    _tie,
    _replace,
    _exchange,
    _remove_bias,
    _prune,
    _delete_block,
    _insert_block,
]


@pytest.mark.deep
@in_modes
@pytest.mark.parametrize("change", _CHANGES)
def test_a_model_may_change_between_steps(
    change: Callable[[Any], list[nn.Parameter]], mode: str, tmp_path: Path
) -> None:
    def scenario(side: Side) -> None:
        side.step(0)
        side.step(1)
        new = change(side.model)
        if new:
            side.optimizer.add_param_group({"params": new})
        for number in range(2, 5):
            loss = side.loss(number)
            side.note(loss)
            loss.backward()
            side.note(torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.5))
            side.optimizer.step()
            side.optimizer.zero_grad()
        kept = {name: value.clone() for name, value in side.model.state_dict().items()}
        states = copy.deepcopy(side.optimizer.state_dict())
        side.step(5)
        side.model.load_state_dict(kept)
        side.optimizer.load_state_dict(states)
        side.step(6)
        side.model.eval()
        side.note(side.loss(7), *side.model.state_dict().values())

    require_same(scenario, tmp_path, mode)


@pytest.mark.deep(but=1)
@in_modes
@pytest.mark.parametrize("kind", ["tensors", "parameters"])
def test_functional_calls_with_weights_of_the_users(kind: str, mode: str, tmp_path: Path) -> None:
    """Trained by an optimizer of their own, between steps of the engine's."""

    def scenario(side: Side) -> None:
        side.step(0)
        values = {name: parameter.detach().clone() for name, parameter in side.model.named_parameters()}
        make = nn.Parameter if kind == "parameters" else torch.Tensor.requires_grad_
        weights = {name: make(value) for name, value in values.items()}
        other = torch.optim.SGD(list(weights.values()), 0.1)
        for number in range(2):
            loss = functional_call(side.model, weights, kwargs=side.batch(number))
            side.note(loss)
            loss.backward()
            other.step()
            other.zero_grad()
        side.note(*weights.values())
        side.step(1)

    require_same(scenario, tmp_path, mode)


@pytest.mark.deep(but=1)
@in_modes
@pytest.mark.parametrize("create_graph", [True, False])
def test_fast_weights(create_graph: bool, mode: str, tmp_path: Path) -> None:
    """As MAML does: weights that follow from the model's are what the loss is taken with."""

    def scenario(side: Side) -> None:
        for number in range(2):
            fast: dict[str, Any] = dict(side.model.named_parameters())
            inner = functional_call(side.model, fast, kwargs=side.batch(number))
            gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=create_graph)
            fast = {name: value - 0.1 * g for (name, value), g in zip(fast.items(), gradients, strict=True)}
            loss = functional_call(side.model, fast, kwargs=side.batch(number + 5))
            side.note(loss)
            loss.backward()
            side.optimizer.step()
            side.optimizer.zero_grad()

    require_same(scenario, tmp_path, mode, changes={"infinity": {"host_memory_budget": "64MiB"}})


def test_a_vertical_step_that_begins_anew_leaves_no_gradient_twice(tmp_path: Path) -> None:
    """A block that came later is no unit: autograd has added to its gradients before the order is given up."""

    def append(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model.blocks.append(nn.Linear(WIDTH, WIDTH))
        optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})

    with Twins(tmp_path, PLAIN.make("none"), plain=PLAIN.make("reentrant"), gradient_accumulation_steps=2) as twins:
        for step in range(3):
            if step == 1:
                twins.change(append)
            batches = [make_batch(step, index) for index in range(2)]
            for batch in batches:
                (twins.plain(**batch) / 2).backward()
            twins.expected.step()
            twins.expected.zero_grad()
            twins.engine.train_batch(iter(batches))
        assert twins.engine.report.schedule == "ordinary"
        twins.require_equal()


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("is_gathered", [False, True])
@in_modes
def test_a_parameter_made_of_a_held_one_is_refused_by_name(is_gathered: bool, mode: str, tmp_path: Path) -> None:
    model = PLAIN.make("none")
    engine, *_ = infinity.initialize(model=model, config=config_for(tmp_path, mode, model))
    with engine, infinity.GatheredParameters(model.head.weight, enabled=is_gathered):
        with pytest.raises(ModelError, match=r"'head.weight'.*weight.detach\(\).clone\(\)"):
            nn.Parameter(model.head.weight)
        with pytest.raises(ModelError, match="Register parametrizations before"):
            torch.nn.utils.parametrizations.weight_norm(model.head)
        assert torch.equal(nn.Parameter(model.head.weight.detach().clone()), model.head.weight)


_OLD: Any = nn.utils
_NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": _OLD.weight_norm,
    "old spectral_norm": _OLD.spectral_norm,
}


@pytest.mark.deep(but=2)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("mode", ["in backward", "deferred", "resident", "vertical"])
@pytest.mark.parametrize("norm", _NORMS)
def test_a_normalised_weight_trains_as_in_torch(norm: str, mode: str, tmp_path: Path) -> None:
    class Normalised(Block):
        def __init__(self) -> None:
            super().__init__()
            _NORMS[norm](self.up)

    case = Case("normalised", lambda checkpointing: Net(checkpointing, make_block=Normalised), token_batch)
    train(case, mode, tmp_path)


class _Renormalising(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5)


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("mode", MODES)
def test_an_embedding_with_max_norm_trains_as_in_torch(mode: str, tmp_path: Path) -> None:
    train(Case("max_norm", _Renormalising, token_batch), mode, tmp_path)


class _Sparse(Net):
    def __init__(self, checkpointing: str) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


def test_a_sparse_gradient_is_warned_of_once(tmp_path: Path) -> None:
    case = Case("sparse", _Sparse, token_batch)
    model = case.make("none")
    with engine_on_nvme(tmp_path, model) as engine:
        batch = {"tokens": torch.ones(2, 3, dtype=torch.int64), "labels": torch.ones(2, 3, dtype=torch.int64)}
        with pytest.warns(OtherNumbersWarning, match=r"embedding\.weight.*sparse=False") as caught:
            for _ in range(2):
                engine.backward(engine(**batch))
                engine.step()
        assert sum(isinstance(warning.message, OtherNumbersWarning) for warning in caught) == 1


class _Looking(nn.Module):
    def __init__(self, look: Callable[[nn.Module, nn.Parameter], Any]) -> None:
        super().__init__()
        self.enc = nn.Linear(4, 6)
        look(self, self.enc.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.enc(x).sum()


def _as_attribute(module: Any, weight: nn.Parameter) -> None:
    module.dec = weight.t()


def _as_buffer(module: Any, weight: nn.Parameter) -> None:
    module.register_buffer("dec", weight.data[1:3])


def _in_a_list(module: Any, weight: nn.Parameter) -> None:
    module.dec = [{"first": weight.detach()[0]}]


def _the_parameter_itself(module: Any, weight: nn.Parameter) -> None:
    module.dec = [weight, weight.detach().clone()]


@pytest.mark.parametrize("look", [_as_attribute, _as_buffer, _in_a_list])
def test_what_looks_at_a_weights_memory_is_refused_by_name(look: Callable[..., Any], tmp_path: Path) -> None:
    model = _Looking(look)
    before = copy.deepcopy(model.enc.state_dict())
    with pytest.raises(ModelError, match=r"'dec' is a view of parameter 'enc\.weight'.*in forward"):
        engine_on_nvme(tmp_path, model)
    assert all(torch.equal(before[name], value) for name, value in model.enc.state_dict().items())


def test_a_parameter_in_a_list_and_a_copy_are_not_refused(tmp_path: Path) -> None:
    engine = engine_on_nvme(tmp_path, _Looking(_the_parameter_itself))
    engine.close()


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("tier", ["nvme", "none"])
def test_a_transformer_encoder_takes_torchs_fast_path(tier: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = _Encoder().eval()
    model = copy.deepcopy(plain)
    path = str(tmp_path) if tier == "nvme" else None
    offload = {key: {"device": tier, "nvme_path": path} for key in ("offload_param", "offload_optimizer")}
    engine = engine_on_nvme(tmp_path, model, {"zero_optimization": offload})
    x = torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with engine, torch.no_grad():
        engine.eval()
        found = engine(x, padding)
        assert torch.equal(found, plain(x, padding))
        assert not found[0, 3:].any(), "padding is zero on the fast path"
