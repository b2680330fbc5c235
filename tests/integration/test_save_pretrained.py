"""What an engine, and ``infinity export`` of a checkpoint, write: the files that transformers itself writes."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import infinity
from infinity.deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from infinity.errors import StorageError
from tests.exactness.lockstep import everything_on_nvme
from tests.internals import drive_tensors, main
from tests.small_transformers import MODELS, SMALL, are_equal, assert_equal, make, read_weights


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "drive").mkdir()
    return everything_on_nvme(tmp_path / "drive")


def _assert_same_files(ours: Path, theirs: Path) -> None:
    assert are_equal(read_weights(ours), read_weights(theirs))
    configs = [{path.name: path.read_text() for path in each.glob("*config.json")} for each in (ours, theirs)]
    assert configs[0] == configs[1]


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_that_transformers_writes(
    name: str, precision: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_tensors, "LEAST_BYTES", 64)
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "fp32")
    if precision == "bf16":
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
        # With remainders it is rounded half up.
        config |= {"bf16": {"enabled": True}, "infinity": {**config["infinity"], "main_weights": "fp32"}}
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.save_pretrained(tmp_path / "ours", max_shard_size="100KB")
        engine.save_fp32_model(tmp_path / "ours-fp32")
    _assert_same_files(tmp_path / "ours", tmp_path / precision)
    _assert_same_files(tmp_path / "ours-fp32", tmp_path / "fp32")
    again = type(model).from_pretrained(tmp_path / "ours-fp32")
    assert_equal(again, type(model).from_pretrained(tmp_path / "fp32"))


def _train(engine: Any) -> None:
    tokens = torch.arange(32).reshape(2, 16)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_what_was_trained_is_loaded_by_transformers(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.arange(16).reshape(1, 16)
    model = MODELS[name]()
    model.config.dtype = torch.float32  # as from_pretrained leaves it
    with infinity.initialize(model=model, config={**config, "bf16": {"enabled": True}})[0] as engine:
        for _ in range(2):
            _train(engine)
        engine.save_pretrained(tmp_path / "16", max_shard_size=50_000)
        engine.save_16bit_model(tmp_path / "own names")
        engine.save_fp32_model(tmp_path / "32")
        mains = {fqn: infinity.safe_get_full_fp32_param(value) for fqn, value in engine.module.named_parameters()}
        with torch.no_grad():
            expected = engine.eval()(input_ids=tokens).logits
    for folder in ("16", "own names"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded(input_ids=tokens).logits, expected)
    assert len(list((tmp_path / "16").glob("*.safetensors"))) > 3
    for fqn, value in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "32").named_parameters():
        main = mains[fqn]
        assert torch.equal(value, main)


def test_what_was_loaded_under_old_names_is_written_under_them(config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS["mixtral"]().save_pretrained(tmp_path / "old")
    model = infinity.load_pretrained(transformers.MixtralForCausalLM, tmp_path / "old", config=config)
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.save_pretrained(tmp_path / "new")
    _assert_same_files(tmp_path / "new", tmp_path / "old")
    assert any("experts.3.w1" in name for name in read_weights(tmp_path / "new"))


def test_saving_again_leaves_one_save(config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=MODELS["llama"](), config=config)
    folder = tmp_path / "out"
    with engine:
        for size in ("50KB", "1GB", "80KB", "1GB"):
            _train(engine)
            engine.save_pretrained(folder, max_shard_size=size)
            loaded = infinity.load_pretrained(transformers.LlamaForCausalLM, folder)
            assert torch.equal(loaded.lm_head.weight, engine.module.lm_head.weight)
            assert (folder / "model.safetensors").exists() == (size == "1GB")
            assert (folder / "model.safetensors.index.json").exists() == (size != "1GB")
        engine.save_16bit_model(folder, max_shard_size="50KB")
        assert not (folder / "model.safetensors").exists()
        assert infinity.load_pretrained(transformers.LlamaForCausalLM, folder) is not None


def test_bad_sizes_and_places_are_refused(
    config: dict[str, Any], tmp_path: Path, small_tmpfs: Callable[[int], Path]
) -> None:
    full = small_tmpfs(1 << 15)
    with infinity.initialize(model=make("BertModel", **SMALL), config=config)[0] as engine:
        for size in (0, "many", -3):
            with pytest.raises(ValueError, match="max_shard_size must be"):
                engine.save_pretrained(tmp_path / "out", max_shard_size=size)
        engine.save_pretrained(tmp_path / "as there", safe_serialization=True, is_main_process=True, push_to_hub=False)
        for cannot in ({"safe_serialization": False}, {"push_to_hub": True}):
            with pytest.raises(ValueError, match=next(iter(cannot))):
                engine.save_pretrained(tmp_path / "out", **cannot)
        assert not (tmp_path / "out").exists()
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="file"):
            engine.save_pretrained(tmp_path / "file")
        with pytest.raises(StorageError, match="cannot take the weights"):
            engine.save_fp32_model(full)
        assert not list(full.glob("*.safetensors"))


_CODE = """
from transformers import LlamaForCausalLM

from .names import NOTHING


class Own(LlamaForCausalLM):
    pass


Own.register_for_auto_class("AutoModelForCausalLM")
"""


def test_code_of_a_model_is_saved_beside_it(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_models").mkdir()
    (tmp_path / "own_models" / "own.py").write_text(_CODE)
    (tmp_path / "own_models" / "names.py").write_text("NOTHING = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("own_models.own").Own(MODELS["llama"]().config)
    model.save_pretrained(tmp_path / "theirs")
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.save_pretrained(tmp_path / "ours")
        engine.save_16bit_model(tmp_path / "16bit")
    for name in ("ours", "16bit"):
        assert (tmp_path / name / "names.py").is_file() and (tmp_path / name / "own.py").is_file()
        assert json.loads((tmp_path / name / "config.json").read_text())["auto_map"] == {
            "AutoModelForCausalLM": "own.Own"
        }
    _assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.fixture
def bf16_config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "drive").mkdir()
    return everything_on_nvme(tmp_path / "drive", {"bf16": {"enabled": True}})


def _saved(name: str, bf16_config: dict[str, Any], folder: Path) -> Path:
    """A checkpoint, and beside it what the engine exports itself; returns the checkpoint's directory."""
    torch.manual_seed(0)
    with infinity.initialize(model=MODELS[name](), config=bf16_config)[0] as engine:
        if name not in ("t5", "vit"):
            tokens = torch.arange(32).reshape(2, 16)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save_checkpoint(folder / "checkpoints")
        engine.save_fp32_model(folder / "expected")
    return folder / "checkpoints"


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "mixtral", "qwen3-moe", "t5", "bert", "vit"])
def test_files_are_those_that_the_engine_writes(name: str, bf16_config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = _saved(name, bf16_config, tmp_path)
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
    bf16_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model.append(model[1])
    names = set(model.state_dict())
    with infinity.initialize(model=model, config=bf16_config)[0] as engine:
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
    bf16_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = _saved("llama", bf16_config, tmp_path)
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
    (tmp_path / "code").mkdir()
    for text in ('{"model_type": "x", "auto_map": {"AutoConfig": "evil.Config"}}', '{"hidden_size": 4', "[]"):
        (tmp_path / "code" / "config.json").write_text(text)
        told = fails(checkpoint, out, "--config-from", tmp_path / "code")
        assert "no model can be built" in told and "Name the directory" in told
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
