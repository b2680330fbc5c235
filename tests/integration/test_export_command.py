"""``python -m infinity export``: what it writes of a checkpoint, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import infinity
from infinity.deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from tests.exactness.lockstep import everything_on_nvme
from tests.internals import main
from tests.small_transformers import MODELS, are_equal, assert_equal, read_weights


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "drive").mkdir()
    return everything_on_nvme(tmp_path / "drive", {"bf16": {"enabled": True}})


def _saved(name: str, config: dict[str, Any], folder: Path) -> Path:
    """A checkpoint, and beside it what the engine exports itself; returns the checkpoint's directory."""
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=MODELS[name](), config=config)
    with engine:
        if name not in ("t5", "vit"):
            tokens = torch.arange(32).reshape(2, 16)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save_checkpoint(folder / "checkpoints")
        engine.save_fp32_model(folder / "expected")
    return folder / "checkpoints"


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral", "qwen3-moe", "t5", "bert", "vit"])
def test_files_are_those_that_the_engine_writes(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = _saved(name, config, tmp_path)
    out = tmp_path / "out"
    command = ["export", str(checkpoint), str(out), "--config-from", str(tmp_path / "expected")]
    assert main([*command, "--max-shard-size", "100KB"]) == 0
    assert are_equal(read_weights(out), read_weights(tmp_path / "expected"))
    assert len(list(out.glob("*.safetensors"))) > 1
    for file in (tmp_path / "expected").glob("*config.json"):
        assert json.loads((out / file.name).read_text()) == json.loads(file.read_text())
    made = type(MODELS[name]())
    assert_equal(made.from_pretrained(out), made.from_pretrained(tmp_path / "expected"))
    assert main([*command, "--dtype", "bfloat16"]) == 0
    loaded = made.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert_equal(loaded, made.from_pretrained(tmp_path / "expected", dtype=torch.bfloat16))
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]


def test_without_a_config_what_is_tied_is_there_under_all_of_its_names(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model.append(model[1])
    names = set(model.state_dict())
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.save_checkpoint(tmp_path / "checkpoints")
        main_weight = infinity.safe_get_full_fp32_param(engine.module[0].weight)
    assert main(["export", str(tmp_path / "checkpoints"), str(tmp_path / "out"), "--json"]) == 0
    convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "checkpoints", tmp_path / "converted", safe_serialization=True
    )
    for folder in ("out", "converted"):
        found = read_weights(tmp_path / folder)
        assert found.keys() == names
        assert all(torch.equal(found[f"{number}.weight"], main_weight) for number in (0, 2))
    num_bytes = sum(value.nbytes for value in read_weights(tmp_path / "out").values())
    assert json.loads(capsys.readouterr().out)["num_bytes"] == num_bytes


def test_failures_are_one_sentence_and_leave_what_was_there(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _saved("llama", config, tmp_path)
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out)]) == 0
    before = read_weights(out)

    def fails(*arguments: object) -> str:
        capsys.readouterr()
        assert main(["export", *map(str, arguments)]) == 1
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert told.count("Error: ") == 1
        return told

    assert "nowhere" in fails(tmp_path / "nowhere", out)
    assert "'second'" in fails(checkpoint, out, "--tag", "second")
    assert "config.json" in fails(checkpoint, out, "--config-from", tmp_path / "drive")
    transformers.BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path / "bert")
    assert "'model.embed_tokens.weight' is not in the model" in fails(
        checkpoint, out, "--config-from", tmp_path / "bert"
    )
    transformers.LlamaConfig(architectures=["../evil"]).save_pretrained(tmp_path / "evil")
    assert "'../evil'" in fails(checkpoint, out, "--config-from", tmp_path / "evil")
    (tmp_path / "file").write_text("")
    assert "'" + str(tmp_path / "file") + "'" in fails(checkpoint, tmp_path / "file")
    folder = next(checkpoint.glob("*/tensors.zarr/parameters/lm_head.weight/weight"))
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(10_000)
        byte = file.read(1)
        file.seek(10_000)
        file.write(bytes([byte[0] ^ 1]))
    assert "damaged" in fails(checkpoint, out)
    assert read_weights(out).keys() == before.keys()
    assert not list(out.glob(".*"))
