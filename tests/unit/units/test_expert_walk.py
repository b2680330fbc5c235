"""Experts that ranks use together: the bits of whole layers, in one order on ranks that route to other experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.experts import ExpertTiles, experts_of, experts_to_cut, walk_along
from infinity.units.tiling import Tiling

_EXPERTS, _WIDTH, _INNER = 8, 16, 24
_CHOSEN = ([[1, 4], [4, 1], [1, 2]], [[4, 6], [6, 7], [6, 4]])
"""Of two ranks, the experts of each token."""
_IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


def _experts(implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=_WIDTH, moe_intermediate_size=_INNER, num_experts=_EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = implementation
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    torch.manual_seed(0)
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return nn.ModuleDict({"experts": module})


def _cut(model: Any, *, touched_only: bool = False) -> list[ExpertTiles]:
    """The experts, of which each call on a rank uses those of both."""
    tiling = Tiling(model, None, 4, ())
    tiling.cut_experts(experts_to_cut(model, "by_expert", is_paged=True), touched_only=touched_only)
    tiling.show()
    tiles = experts_of(model["experts"])
    counts = torch.bincount(torch.tensor(_CHOSEN).flatten(), minlength=_EXPERTS).tolist()
    model["experts"].register_forward_pre_hook(lambda module, _: walk_along(module, tiles, counts))
    return tiles


def _run(model: Any, rank: int, *, x_requires_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, _WIDTH, generator=generator).requires_grad_(x_requires_grad)
    output = model["experts"](x, torch.tensor(_CHOSEN[rank]), torch.rand(3, 2, generator=generator))
    if output.requires_grad:
        output += 1  # as models add what shared experts have computed
        output.square().sum().backward()
    return output.detach(), x.grad


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("touched_only", [False, True])
def test_the_same_bits(implementation: str, touched_only: bool) -> None:
    for rank in (0, 1):
        model = _experts(implementation)
        whole = copy.deepcopy(model)
        tensors = _cut(model, touched_only=touched_only)
        for expected, found in zip(_run(whole, rank), _run(model, rank), strict=True):
            assert expected is not None and found is not None and torch.equal(expected, found)
        for tensor in tensors:
            gradient = whole.get_parameter(tensor.tiled.fqn).grad
            assert gradient is not None
            for number, tile in enumerate(tensor.tiled.tiles):
                if touched_only and number in (0, 3, 5):  # of no rank
                    assert tile.grad is None
                else:
                    assert tile.grad is not None and torch.equal(gradient[number], tile.grad[0])


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("x_requires_grad", [False, True])
def test_forward_and_backward_ask_for_experts_in_one_order(
    implementation: str, trains: bool, x_requires_grad: bool
) -> None:
    of_ranks = []
    for rank in (0, 1):
        model = _experts(implementation).requires_grad_(trains)
        tensors = _cut(model)
        used, needed = list[tuple[int, int]](), list[tuple[int, int]]()
        places = {}
        for number, tensor in enumerate(tensors):
            for expert, tile in enumerate(tensor.experts()):
                place = number, expert
                places[tile.weight.data_ptr()] = place
                tile.register_forward_pre_hook(lambda *_, place=place, used=used: used.append(place))

        def pack(tensor: torch.Tensor, places: Any = places) -> Any:
            return tensor, places.get(tensor.data_ptr())

        def unpack(saved: Any, needed: Any = needed) -> torch.Tensor:
            tensor: torch.Tensor
            tensor, place = saved
            if place is not None and place not in needed[-1:]:
                needed.append(place)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            _run(model, rank, x_requires_grad=x_requires_grad)
        of_ranks.append((used, needed))
    assert of_ranks[0] == of_ranks[1]
    used, needed = of_ranks[0]
    assert len(used) == len(set(used)) == 2 * 5
    if implementation != "batched_mm" and (trains or x_requires_grad):
        assert needed == used[::-1]
    else:
        assert not needed


def test_without_gradients_nothing_is_kept() -> None:
    model = _experts("eager")
    _cut(model)
    with torch.no_grad():
        assert not _run(model, 0)[0].requires_grad


def test_an_expert_beside_the_router_names_the_cure() -> None:
    model = _experts("grouped_mm")
    tiles = experts_of(model["experts"])
    assert not tiles
    tiling = Tiling(model, None, 4, ())
    tiling.cut_experts(experts_to_cut(model, "by_expert", is_paged=True), touched_only=False)
    tiling.show()
    tiles = experts_of(model["experts"])
    model["experts"].register_forward_pre_hook(lambda module, _: walk_along(module, tiles, [1] + [0] * 7))
    with pytest.raises(ModelError, match=r"infinity\.experts"):
        _run(model, 0)
