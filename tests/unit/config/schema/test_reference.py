"""What is told of a key: what it takes, with bounds, and its default."""

from __future__ import annotations

import pytest

from infinity.config.schema.reference import Key, keys, texts_of
from infinity.config.schema.vocabulary import blocks

_KEYS: dict[str, Key] = {key.name: key for key in keys()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train_batch_size", "a whole number, more than 0"),
        ("zero_optimization.stage", "a whole number, at least 0 and at most 3"),
        ("infinity.update_workers", "a whole number, at least 1"),
        ("infinity.io_deadline_seconds", "a number, at least 0.01"),
        ("infinity.durable_path", "a path, an object, or a list of those"),
        ("zero_optimization.offload_param.nvme_path", "a path, an object, or a list of those"),
        ("bf16.check_grad_overflow", "`true` or `false`"),
    ],
)
def test_what_a_key_takes(name: str, kind: str) -> None:
    assert _KEYS[name].kind == kind


def test_a_default_that_is_decided_is_told_as_auto() -> None:
    assert _KEYS["bf16.check_grad_overflow"].default == 'default `"auto"`'
    assert _KEYS["train_batch_size"].default == "not set by default"


@pytest.mark.parametrize(
    "name",
    [
        "gradient_allreduce_op",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
    ],
)
def test_what_is_an_error_for_several_processes_says_so(name: str) -> None:
    """As `infinity.config.ranks` has them."""
    assert "it is an error to ask for anything else" in _KEYS[name].text


def test_every_key_with_an_effect_says_what_it_does() -> None:
    texts = {path + name: text for path, block in blocks() for name, text in texts_of(block).items()}
    assert [key.name for key in _KEYS.values() if key.has_effect and not texts.get(key.name)] == []
