"""Models, and what the speed of drives means for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.io_profile.model import ModelRefused, facts_of, read_model
from infinity.io_profile.training import Outlook


@pytest.mark.parametrize(
    ("text", "num_parameters"),
    [("7B", 7 * 10**9), ("374m", 374 * 10**6), ("1.5 b", 15 * 10**8), ("1e6", 10**6), ("1_000", 1000), ("3", 3)],
)
def test_models_by_number(text: str, num_parameters: int) -> None:
    assert facts_of(*read_model(text)).num_parameters == num_parameters


@pytest.mark.parametrize("text", ["0", "-7B", "seven", "7X", "", "1e300", "meta-llama/Llama-3-8B"])
def test_models_that_are_none(text: str) -> None:
    with pytest.raises(ModelRefused):
        read_model(text or " ")


def test_a_hugging_face_config_is_counted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    expected = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    for path in (tmp_path, tmp_path / "config.json"):
        assert facts_of(*read_model(str(path))).num_parameters == expected


def test_a_config_without_a_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelRefused, match="config"):
        read_model(str(tmp_path))


def test_what_the_drives_speed_means() -> None:
    facts = facts_of(*read_model("1B"))
    moved = facts.least.read + facts.least.write
    outlook = Outlook(facts, moved / 10.0, 300.0, tbw_bytes=1e15, num_drives=2)
    values = outlook.as_json()
    assert values["io_seconds_per_step"] == pytest.approx(10.0)
    assert values["tokens_per_step_that_hide_io"] == pytest.approx(3000.0)
    assert values["life_steps"] == pytest.approx(1e15 / facts.least.write)
    words = " ".join(" ".join(line) for line in outlook.lines(values))
    assert "3,000 tokens per step" in words
    assert "1,000 TB written in all on 2 drives" in words


def test_without_a_rating_the_example_is_called_one() -> None:
    outlook = Outlook(facts_of(*read_model("1B")), 1e9, 1.0, tbw_bytes=None, num_drives=1)
    values = outlook.as_json()
    assert "as an example" in dict(outlook.lines(values))["life of the drives"]
    assert values["life_steps"] is None


def test_what_compute_reaches_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.io_profile.training.measure_flops_per_second", lambda: (6e12, "a device"))
    facts = facts_of(*read_model("1B"))
    outlook = Outlook(facts, 1e9, None, tbw_bytes=None, num_drives=1)
    values = outlook.as_json()
    assert values["tokens_per_second"] == pytest.approx(1000.0)
    tokens = values["tokens_per_step_that_hide_io"]
    words = dict(outlook.lines(values))
    assert "6 TFLOP/s on a device" in words["compute hides it from"]
    assert f"{tokens * 6 / 8:,.0f} with activation checkpointing" in words[""]
