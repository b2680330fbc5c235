"""What is told of a key: the text under its field, and why it has no effect."""

from __future__ import annotations

import pytest

from infinity.config.schema.json_schema import rules_of, texts_of
from infinity.config.schema.vocabulary import blocks, child_block

_FIELDS = {path + name: field for path, block in blocks() for name, field in block.model_fields.items()}


@pytest.mark.parametrize(
    "name",
    ["gradient_allreduce_op", "zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients"],
)
def test_what_is_an_error_for_several_processes_says_so(name: str) -> None:
    """As `infinity.config.ranks` has them."""
    assert any("another value is an error" in rule for rule in rules_of(_FIELDS[name]))


def test_every_key_with_an_effect_says_what_it_does() -> None:
    texts = {path + name: text for path, block in blocks() for name, text in texts_of(block).items()}
    silent = [name for name, field in _FIELDS.items() if not any(rules_of(field)) and child_block(field) is None]
    assert [name for name in silent if not texts.get(name)] == []
