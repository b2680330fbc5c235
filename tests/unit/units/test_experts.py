"""Tensors of all experts that are cut into experts: the same bits by each of transformers' implementations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ModelError
from infinity.units.experts import experts_to_cut
from infinity.units.tiling import Tiling

_EXPERTS, _WIDTH, _INNER = 8, 16, 24


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


def _cut(model: nn.Module, *, touched_only: bool = False) -> Tiling:
    tiling = Tiling(model, None, 4, ())
    tiling.cut_experts(experts_to_cut(model, "by_expert", is_paged=True), touched_only=touched_only)
    tiling.show()
    return tiling


def _run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, _WIDTH, generator=generator).requires_grad_()
    chosen = torch.randint(_EXPERTS - 2, (5, 2), generator=generator)  # two never get a token
    weights = torch.rand(5, 2, generator=generator)
    output = model(x, chosen, weights)
    output.square().sum().backward()
    return output.detach(), x.grad


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("touched_only", [False, True])
def test_the_same_bits(implementation: str, touched_only: bool) -> None:
    model = _Experts(implementation)
    whole = copy.deepcopy(model)
    names = list(model.state_dict())
    tiling = _cut(model, touched_only=touched_only)
    for expected, found in zip(_run(whole), _run(model), strict=True):
        assert torch.equal(expected, found)
    for tiled in tiling.groups.tiled:
        gradient = whole.get_parameter(tiled.fqn).grad
        for number, tile in enumerate(tiled.tiles):
            if touched_only and not gradient[number].any():
                assert tile.grad is None
            else:
                assert tile.grad is not None and torch.equal(gradient[number], tile.grad[0])
    assert list(model.state_dict()) == names
    tiling.undo()
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.state_dict().items())


def test_frozen_experts_leave_no_gradient() -> None:
    model = _Experts("grouped_mm").requires_grad_(False)
    tiling = _cut(model)
    _run(model)
    assert all(tile.grad is None for tiled in tiling.groups.tiled for tile in tiled.tiles)


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
