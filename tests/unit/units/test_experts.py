"""Tensors of all experts that are cut into experts: the bits of whole ones by each of transformers' implementations.

Ranks that use experts together ask for them in one order, though each routes to experts of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.experts import experts_of, experts_to_cut, walk_along
from infinity.units.tiling import Tiling

_EXPERTS, _WIDTH, _INNER = 8, 16, 24
_CHOSEN = ([[1, 4], [4, 1], [1, 2]], [[4, 6], [6, 7], [6, 4]])
"""Of two ranks, the experts of each token."""
_IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]


class _Experts(nn.Module):
    """As transformers' modules of experts: what its decorator looks at, and a router."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3MoeConfig(
            hidden_size=_WIDTH, moe_intermediate_size=_INNER, num_experts=_EXPERTS, num_experts_per_tok=2
        )
        config._experts_implementation = implementation
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        torch.manual_seed(0)
        self.experts = Qwen3MoeExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        return self.experts(x, chosen, weights)


def _cut(model: _Experts, *, touched_only: bool = False, counts: list[int] | None = None) -> Tiling:
    """Cut the experts. With ``counts`` of tokens for each expert, a call uses those that have any on some rank."""
    tiling = Tiling(model, None, 4, ())
    tiling.cut_experts(experts_to_cut(model, "by_expert", is_paged=True), touched_only=touched_only)
    tiling.show()
    if counts is not None:
        tiles = experts_of(model.experts)
        model.experts.register_forward_pre_hook(lambda module, _: walk_along(module, tiles, counts))
    return tiling


_OF_BOTH_RANKS = torch.bincount(torch.tensor(_CHOSEN).flatten(), minlength=_EXPERTS).tolist()


def _run(model: nn.Module, rank: int = 0, *, x_requires_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, _WIDTH, generator=generator).requires_grad_(x_requires_grad)
    output = model(x, torch.tensor(_CHOSEN[rank]), torch.rand(3, 2, generator=generator))
    if output.requires_grad:
        output += 1  # as models add what shared experts have computed
        output.square().sum().backward()
    return output.detach(), x.grad


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("touched_only", [False, True])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_same_bits(implementation: str, touched_only: bool, rank: int | None) -> None:
    """Alone, or as one of two ranks."""
    model = _Experts(implementation)
    whole = copy.deepcopy(model)
    names = list(model.state_dict())
    tiling = _cut(model, touched_only=touched_only, counts=None if rank is None else _OF_BOTH_RANKS)
    for expected, found in zip(_run(whole, rank or 0), _run(model, rank or 0), strict=True):
        assert expected is not None and found is not None and torch.equal(expected, found)
    used = {1, 2, 4} if rank is None else {1, 2, 4, 6, 7}
    for tiled in tiling.groups.tiled:
        gradient = whole.get_parameter(tiled.fqn).grad
        for number, tile in enumerate(tiled.tiles):
            if touched_only and number not in used:
                assert tile.grad is None
            else:
                assert tile.grad is not None and torch.equal(gradient[number], tile.grad[0])
    assert list(model.state_dict()) == names
    tiling.undo()
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("implementation", _IMPLEMENTATIONS)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("x_requires_grad", [False, True])
def test_forward_and_backward_ask_for_experts_in_one_order(
    implementation: str, trains: bool, x_requires_grad: bool
) -> None:
    of_ranks = []
    for rank in (0, 1):
        model = _Experts(implementation).requires_grad_(trains)
        _cut(model, counts=_OF_BOTH_RANKS)
        used, needed = list[tuple[int, int]](), list[tuple[int, int]]()
        places = {}
        for number, tensor in enumerate(experts_of(model.experts)):
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


@pytest.mark.parametrize("counts", [None, _OF_BOTH_RANKS])
def test_without_gradients_nothing_is_kept(counts: list[int] | None) -> None:
    model = _Experts("grouped_mm").requires_grad_(False)
    tiling = _cut(model, counts=counts)
    _run(model)
    assert all(tile.grad is None for tiled in tiling.groups.tiled for tile in tiled.tiles)
    with torch.no_grad():
        assert not _run(model.requires_grad_(True))[0].requires_grad


def test_an_expert_beside_the_router_names_the_cure() -> None:
    model = _Experts("grouped_mm")
    assert not experts_of(model.experts)
    _cut(model, counts=[1] + [0] * 7)
    with pytest.raises(ModelError, match=r"infinity\.experts"):
        _run(model)


def test_what_needs_the_whole_tensor_names_the_cure() -> None:
    model = _Experts("grouped_mm")
    _cut(model)
    weight = model.experts.down_proj
    for use in (
        lambda: weight.sum(),
        lambda: weight.data,
        lambda: weight[1:3],
        lambda: weight.transpose(0, 1),
        lambda: weight.transpose(1, 2) @ torch.ones(_WIDTH),
        lambda: weight.mT.clone(),
    ):
        with pytest.raises(ModelError, match=r"experts\.down_proj.*infinity\.experts"):
            use()
    with pytest.raises(IndexError):
        weight[_EXPERTS]
    _, out, width = weight.shape
    for turned in (weight.mT, weight.transpose(1, 2)):
        assert turned.shape == turned.size() == (_EXPERTS, width, out) and turned.size(-1) == out
        assert turned.dim() == 3 and turned.dtype == weight.dtype


def test_auto_cuts_frozen_experts_that_are_paged() -> None:
    model = _Experts("grouped_mm")
    model.experts.down_proj.requires_grad_(False)
    assert [names for _, _, names in experts_to_cut(model, "auto", is_paged=True)] == [["down_proj"]]
    assert not experts_to_cut(model, "auto", is_paged=False)
    assert not experts_to_cut(model, "whole", is_paged=True)
    assert len(experts_to_cut(model, "touched_only", is_paged=False)[0][2]) == 2
