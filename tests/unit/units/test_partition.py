"""Models are cut into units: by themselves for the usual families, by patterns where told to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from infinity.errors import ConfigError
from infinity.units.partition import UnitMembers, find_blocks, partition
from tests.exactness import families


class _Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])


def _require_partition(model: nn.Module, units: list[UnitMembers], item_bytes: int) -> None:
    """Every parameter in exactly one unit, in the order of registration, with the right sizes."""
    named = dict(model.named_parameters())
    order = list(named)
    assert sorted(fqn for unit in units for fqn in unit.fqns) == sorted(order)
    for unit in units:
        assert unit.fqns == sorted(unit.fqns, key=order.index)
        assert unit.num_bytes == sum(named[fqn].numel() for fqn in unit.fqns) * item_bytes
    firsts = [order.index(unit.fqns[0]) for unit in units]
    assert firsts == sorted(firsts)


def _layers(prefix: str, count: int = 2) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (families.llama, _layers("model.layers")),
        (families.qwen2, _layers("model.layers")),
        (families.mixtral, _layers("model.layers")),
        (families.gpt2, _layers("transformer.h")),
        (families.t5, _layers("encoder.block") + _layers("decoder.block")),
        (families.bert, _layers("bert.encoder.layer")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_of_real_models_find_themselves(make: Callable[[], nn.Module], blocks: list[str]) -> None:
    model = make()
    assert find_blocks(model) == blocks
    units = partition(model, 2)
    _require_partition(model, units, 2)
    by_name = {unit.name: unit for unit in units}
    for block in blocks:
        expected = [f"{block}.{name}" for name, _ in model.get_submodule(block).named_parameters()]
        assert by_name[block].fqns == expected
    for unit in units:
        if unit.name not in blocks:
            assert not any(fqn.startswith(f"{block}.") for fqn in unit.fqns for block in blocks)


def test_tied_weights_are_in_the_unit_of_their_first_name() -> None:
    model = families.gpt2()
    units = partition(model, 2)
    owners = [unit.name for unit in units if "transformer.wte.weight" in unit.fqns]
    assert owners == ["transformer.wte"]
    assert not any("lm_head.weight" in unit.fqns for unit in units)


def test_a_blocks_weight_that_others_use_too_is_a_leftover() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.head = nn.Linear(4, 4)
    model.head.weight = model.blocks[1].weight
    units = partition(model, 4)
    _require_partition(model, units, 4)
    assert ["blocks.1.bias"] in [unit.fqns for unit in units]
    assert ["blocks.1.weight"] in [unit.fqns for unit in units], "no block has to stay for it"


def test_only_the_outermost_lists_count() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([_Block(), _Block()])
    assert find_blocks(model) == ["stages.0", "stages.1"]


def test_a_list_of_different_modules_is_no_list_of_blocks() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.ReLU())
    assert find_blocks(model) == []
    assert [unit.fqns for unit in partition(model, 4)] == [["0.weight", "0.bias", "1.weight", "1.bias"]]


@pytest.mark.parametrize(
    ("patterns", "blocks"),
    [
        (["LlamaMLP"], ["model.layers.0.mlp", "model.layers.1.mlp"]),
        (["model.layers.*"], _layers("model.layers")),
        (["*.layers.1"], ["model.layers.1"]),
        (["LlamaDecoderLayer", "LlamaMLP"], _layers("model.layers")),
        (["Embedding", "lm_head"], ["model.embed_tokens", "lm_head"]),
    ],
)
def test_patterns_take_the_place_of_detection(patterns: list[str], blocks: list[str]) -> None:
    model = families.llama()
    if patterns == ["LlamaDecoderLayer", "LlamaMLP"]:
        # The inner pattern matches nothing that is not inside a match already, and the user is told.
        with pytest.raises(ConfigError, match="'LlamaMLP' matches no module"):
            find_blocks(model, patterns)
        return
    assert find_blocks(model, patterns) == blocks
    units = partition(model, 4, patterns)
    _require_partition(model, units, 4)
    assert set(blocks) <= {unit.name for unit in units}


def test_a_pattern_that_matches_nothing_is_an_error_with_the_classes() -> None:
    model = families.llama()
    with pytest.raises(ConfigError, match=r"infinity\.units: 'LlamaDecoderLayr' matches no module") as caught:
        find_blocks(model, ["LlamaMLP", "LlamaDecoderLayr"])
    assert "LlamaDecoderLayer" in str(caught.value)
    assert "'LlamaMLP'" not in str(caught.value)


def test_leftovers_are_cut_between_modules_at_the_size_of_a_block() -> None:
    model = nn.Module()
    width = 512  # a block of 1 MiB in fp32
    model.first = nn.Linear(width, width)
    model.second = nn.Linear(width, width)
    model.blocks = nn.ModuleList([nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)])
    model.tail = nn.Linear(2, 2)
    units = partition(model, 4)
    _require_partition(model, units, 4)
    # A module's own weight and bias stay together although they are larger than a block.
    assert [unit.fqns for unit in units] == [
        ["first.weight", "first.bias"],
        ["second.weight", "second.bias"],
        ["blocks.0.weight"],
        ["blocks.1.weight"],
        ["tail.weight", "tail.bias"],
    ]
