"""Weights that are computed from others, looked at by others, or renormalised where they are used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import infinity
from infinity.errors import ModelError, OtherNumbersWarning
from tests.exactness.case import Case
from tests.exactness.lockstep import everything_on_nvme
from tests.exactness.shapes.blocks import VOCABULARY, WIDTH, Block, Net, token_batch
from tests.exactness.written import MODES, train

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
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    with engine:
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
    with pytest.raises(ModelError, match=r"'dec' looks at the memory of parameter 'enc\.weight'.*in forward"):
        infinity.initialize(model=model, config=everything_on_nvme(tmp_path))
    assert all(torch.equal(before[name], value) for name, value in model.enc.state_dict().items())


def test_a_parameter_in_a_list_and_a_copy_are_not_refused(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=_Looking(_the_parameter_itself), config=everything_on_nvme(tmp_path))
    engine.close()


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return out


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("tier", ["nvme", "none"])
def test_a_transformer_encoder_takes_torchs_fast_path(tier: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = _Encoder().eval()
    model = copy.deepcopy(plain)
    path = str(tmp_path) if tier == "nvme" else None
    offload = {key: {"device": tier, "nvme_path": path} for key in ("offload_param", "offload_optimizer")}
    engine, *_ = infinity.initialize(model=model, config=everything_on_nvme(tmp_path, {"zero_optimization": offload}))
    x = torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with engine, torch.no_grad():
        engine.eval()
        found = engine(x, padding)
        assert torch.equal(found, plain(x, padding))
        assert not found[0, 3:].any(), "padding is zero on the fast path"
