"""Models from files: the same as transformers' `from_pretrained` to the bit, and nothing in memory that is in the files."""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import infinity
from infinity.errors import CheckpointError, ModelError
from tests.exactness.lockstep import everything_on_nvme
from tests.internals import drive_tensors
from tests.small_transformers import MODELS, SMALL, assert_equal, make


@pytest.fixture
def large_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of these models are large."""
    monkeypatch.setattr(drive_tensors, "LEAST_BYTES", 64)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "drive").mkdir()
    return everything_on_nvme(tmp_path / "drive")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    MODELS["llama"]().save_pretrained(tmp_path / "model", max_shard_size="100KB")
    return tmp_path / "model"


def _mapped(model: nn.Module) -> dict[str, str]:
    """Parameter -> path of the file over which it lies, "" without one."""
    areas = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        start, stop = (int(each, 16) for each in span.split("-"))
        areas.append((start, stop, path[0] if path and inode != "0" else ""))
    return {
        name: next(path for start, stop, path in areas if start <= value.data_ptr() < stop)
        for name, value in model.named_parameters()
    }


def test_dtype_by_its_name_in_transformers_4_and_an_index_for_a_path(llama: Path, config: dict[str, Any]) -> None:
    wanted = transformers.LlamaForCausalLM.from_pretrained(llama, dtype="auto")
    for dtype in ("auto", torch.bfloat16):
        model = infinity.load_pretrained(transformers.LlamaForCausalLM, llama, config=config, torch_dtype=dtype)
        assert model.dtype == (wanted.dtype if dtype == "auto" else dtype)
    model = transformers.LlamaForCausalLM(wanted.config)
    assert_equal(infinity.load_pretrained(model, llama / "model.safetensors.index.json", config=config), wanted)


def test_the_text_part_of_a_composite_model(config: dict[str, Any], tmp_path: Path) -> None:
    """Auto classes give the text's class the text's config."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "layer_types": ["full_attention", "full_attention"],
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    whole = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    transformers.Qwen3_5ForConditionalGeneration(whole).save_pretrained(tmp_path / "model")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = infinity.load_pretrained(transformers.AutoModelForCausalLM, tmp_path / "model", config=config)
    assert type(found) is type(wanted)
    assert_equal(found, wanted)


@pytest.mark.deep(but=1)
@pytest.mark.usefixtures("large_is_small")
@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_class_gives_what_from_pretrained_gives(
    name: str, dtype: torch.dtype | str, config: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = MODELS[name]().to(torch.float16 if dtype == "auto" else torch.float32)
    made.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    before = torch.get_rng_state()
    expected = type(made).from_pretrained(tmp_path / "model", dtype=dtype)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    model = infinity.load_pretrained(type(made), tmp_path / "model", config=config, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal(model, expected)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.training == expected.training
    if expected.can_generate():
        assert model.generation_config == expected.generation_config
    large = {name for name, value in model.named_parameters() if value.nbytes >= 64}
    assert all(path for name, path in _mapped(model).items() if name in large)


@pytest.mark.deep(but=1)
@pytest.mark.usefixtures("large_is_small")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_gets_values(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = MODELS[name]()
    made.save_pretrained(tmp_path / "model")
    expected = type(made).from_pretrained(tmp_path / "model").train()
    with torch.device("meta"):
        model = type(made)(copy.deepcopy(made.config))
    next(model.parameters()).requires_grad_(False)
    next(expected.parameters()).requires_grad_(False)
    assert infinity.load_pretrained(model, tmp_path / "model", config=config) is model
    assert_equal(model, expected)
    assert all(path for path in _mapped(model).values())


@pytest.mark.deep(but=2)
@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "bert"])
def test_a_model_with_values_keeps_its_parameters(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = MODELS[name]()
    made.save_pretrained(tmp_path / "model")
    model = MODELS[name]()
    before = dict(model.named_parameters(remove_duplicate=False))
    infinity.load_pretrained(model, tmp_path / "model", config=config)
    assert_equal(model, made)
    assert all(value is before[fqn] for fqn, value in model.named_parameters(remove_duplicate=False))


def test_what_the_files_hold_as_it_is_wanted_is_not_copied(llama: Path, config: dict[str, Any]) -> None:
    model = infinity.load_pretrained(transformers.AutoModelForCausalLM, llama, config=config)
    assert all(path.startswith(str(llama)) for path in _mapped(model).values())
    with torch.no_grad():
        model.lm_head.weight.zero_()  # reaches no file
    again = infinity.load_pretrained(transformers.AutoModelForCausalLM, llama, config=config)
    assert again.lm_head.weight.any()


# ------------------------------------------------------------------------------------------------------ what does not fit


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    make("BertModel", **SMALL, intermediate_size=96).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_what_is_missing_is_named_or_made_as_transformers_does(bert: Path, config: dict[str, Any]) -> None:
    head = transformers.BertForSequenceClassification
    with pytest.raises(ModelError, match=r"missing: classifier\.bias .*\n.*missing: classifier\.weight"):
        infinity.load_pretrained(head, bert, config=config)
    torch.manual_seed(1)
    expected = head.from_pretrained(bert)
    torch.manual_seed(1)
    model, info = infinity.load_pretrained(
        head, bert, config=config, ignore_missing_keys=True, output_loading_info=True
    )
    assert_equal(model, expected)
    assert info["missing_keys"] == {"classifier.bias", "classifier.weight"}


@pytest.mark.parametrize("in_files, of_model", [("module.", ""), ("", "module.")])
@pytest.mark.parametrize("is_plain", [False, True])
def test_names_with_a_prefix(in_files: str, of_model: str, is_plain: bool, tmp_path: Path) -> None:
    """As DDP and torch.compile give them: the error says what to pass, and that loads them."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) if is_plain else MODELS["llama"]()
    torch.save({in_files + name: value for name, value in plain.state_dict().items()}, tmp_path / "saved.pt")
    model = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    target = model
    if of_model:
        if not is_plain:
            pytest.skip("transformers' models have none")
        target = nn.ModuleDict({"module": model})
    with pytest.raises(ModelError, match=r"names in the files .* 'module\.': pass key_mapping=") as told:
        infinity.load_pretrained(target, tmp_path / "saved.pt")
    mapping = ast.literal_eval(str(told.value).split("key_mapping=")[-1])
    infinity.load_pretrained(target, tmp_path / "saved.pt", key_mapping=mapping)
    assert_equal(model, plain)
    if is_plain and in_files:
        with pytest.raises(CheckpointError, match=r"has two tensors for 'w' with key_mapping\. Change its patterns"):
            infinity.load_pretrained(target, tmp_path / "saved.pt", key_mapping={"^.*$": "w"})


@pytest.mark.deep
def test_what_the_model_has_not_is_named(bert: Path, config: dict[str, Any], tmp_path: Path) -> None:
    make("BertForSequenceClassification", **SMALL, intermediate_size=96).save_pretrained(tmp_path / "head")
    with pytest.raises(ModelError, match=r"not in the model: classifier\.bias"):
        infinity.load_pretrained(transformers.BertModel, tmp_path / "head", config=config)
    model = infinity.load_pretrained(
        transformers.BertModel, tmp_path / "head", config=config, ignore_unexpected_keys=True
    )
    assert_equal(model, transformers.BertModel.from_pretrained(tmp_path / "head"))


def test_other_shapes_are_named_or_made_anew(tmp_path: Path, config: dict[str, Any]) -> None:
    head = transformers.BertForSequenceClassification
    make("BertForSequenceClassification", **SMALL, intermediate_size=96).save_pretrained(tmp_path / "head")
    with pytest.raises(ModelError, match=r"classifier\.weight is \(2, 64\), the model's is \(5, 64\)"):
        infinity.load_pretrained(head, tmp_path / "head", config=config, num_labels=5)
    torch.manual_seed(1)
    expected = head.from_pretrained(tmp_path / "head", num_labels=5, ignore_mismatched_sizes=True)
    torch.manual_seed(1)
    model = infinity.load_pretrained(head, tmp_path / "head", config=config, num_labels=5, ignore_mismatched_sizes=True)
    assert_equal(model, expected)


# ------------------------------------------------------------------------------------------------------------ other files


@pytest.fixture
def plain() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    yield model


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_a_file_with_a_state_dict_fills_any_module(
    kind: str, on: str, plain: nn.Module, config: dict[str, Any], tmp_path: Path
) -> None:
    from safetensors.torch import save_model

    file = tmp_path / f"state.{kind}"
    if kind == "pt":
        torch.save(plain.state_dict(), file)
    else:
        save_model(plain, str(file))  # has one of the tied names only
    model = copy.deepcopy(plain).to(on)
    model[2].weight = model[0].weight
    for value in model.parameters():
        if on == "cpu":
            value.data.zero_()
    infinity.load_pretrained(model, file, config=config)
    assert_equal(model, plain)


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_weights_that_a_file_ties_are_apart_in_a_module_that_does_not(on: str, tmp_path: Path) -> None:
    weight = torch.randn(8, 8)
    torch.save({"0.weight": weight, "1.weight": weight, "1.bias": weight[0]}, tmp_path / "saved.pt")
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8)).to(on)
    infinity.load_pretrained(model, tmp_path / "saved.pt")
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(model[1].weight, weight) and torch.equal(model[1].bias, weight[0])


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_strides_are_the_modules(on: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 2)
    saved = {"0.weight": torch.randn(6, 4).t(), **{f"1.{name}": value for name, value in conv.state_dict().items()}}
    torch.save(saved, tmp_path / "saved.pt")
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)).to(on)
    strides = {name: value.stride() for name, value in model.named_parameters()}
    infinity.load_pretrained(model, tmp_path / "saved.pt")
    assert {name: value.stride() for name, value in model.named_parameters()} == strides
    assert all(torch.equal(value, saved[name]) for name, value in model.named_parameters())


def test_a_buffer_that_nobody_knows_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.register_buffer("scale", torch.ones(4), persistent=False)
    with pytest.raises(ModelError, match="'scale' is on the meta device"):
        infinity.load_pretrained(model.to("meta"), tmp_path / "state.pt", config=config)


def test_pickled_shards_are_loaded(llama: Path, config: dict[str, Any], tmp_path: Path) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(llama)
    values = expected.state_dict()
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text((llama / "config.json").read_text())
    names = {name: f"pytorch_model-0000{1 + index % 2}-of-00002.bin" for index, name in enumerate(values)}
    for file in sorted(set(names.values())):
        torch.save({name: values[name] for name in values if names[name] == file}, old / file)
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert_equal(infinity.load_pretrained(transformers.LlamaForCausalLM, old, config=config), expected)


def test_integers_and_float8_are_refused(llama: Path, config: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4, 4, dtype=torch.int8), "bias": torch.ones(4)}, tmp_path / "state.pt")
    with pytest.raises(ModelError, match="weight is int8"):
        infinity.load_pretrained(nn.Linear(4, 4), tmp_path / "state.pt", config=config)
    file = min(llama.glob("*.safetensors"))
    values = safetensors.torch.load_file(file)
    name = min(values)
    safetensors.torch.save_file({**values, name: values[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} is float8_e4m3fn"):
        infinity.load_pretrained(transformers.LlamaForCausalLM, llama, config=config)


# ---------------------------------------------------------------------------------------------------------- hostile files


def _header(entries: dict[str, Any], num_bytes: int = 64) -> bytes:
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def _entry(first: int, last: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param((1 << 60).to_bytes(8, "little") + b"{}", id="absurd-header"),
        pytest.param(_header({"weight": _entry(0, 64, [4, 4])}, 60), id="cut-off"),
        pytest.param(_header({"weight": _entry(0, 64, [1 << 62, 1 << 62])}), id="absurd-shape"),
        pytest.param(_header({"weight": _entry(0, 64, [4, 4]), "bias": _entry(48, 64, [4])}), id="overlapping"),
    ],
)
def test_broken_safetensors_are_refused_by_name(content: bytes, config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        infinity.load_pretrained(model, file, config=config)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.deep(but=4)
@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "/etc/passwd", "a\0b", "", 3, "."])
def test_an_index_cannot_name_what_is_elsewhere(name: Any, llama: Path, config: dict[str, Any]) -> None:
    index = llama / "model.safetensors.index.json"
    contents = json.loads(index.read_text())
    contents["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        infinity.load_pretrained(transformers.LlamaForCausalLM, llama, config=config)


def test_broken_indexes_and_missing_shards_are_named(llama: Path, config: dict[str, Any]) -> None:
    def load() -> None:
        infinity.load_pretrained(transformers.LlamaForCausalLM, llama, config=config)

    index = llama / "model.safetensors.index.json"
    contents = index.read_text()
    shards = sorted(llama.glob("*.safetensors"))
    kept = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"shards that do not exist: {shards[1].name}"):
        load()
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(CheckpointError, match=f"{shards[1].name}' (lacks|has)"):
        load()
    shards[1].write_bytes(kept[: len(kept) // 2])
    with pytest.raises(CheckpointError, match=f"{shards[1].name}' is not a whole"):
        load()
    for broken in ("{", "[]", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(broken)
        with pytest.raises(CheckpointError, match="is not an index"):
            load()
    index.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load()
    index.write_text(contents)


def test_a_wrong_directory_is_named(llama: Path, config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere' does not exist"):
        infinity.load_pretrained(transformers.LlamaForCausalLM, tmp_path / "nowhere", config=config)
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        infinity.load_pretrained(transformers.LlamaForCausalLM, llama, config=config)


def test_pickles_with_code_and_other_things_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    for content in ({"weight": print}, [torch.ones(4)], {"model": {"weight": torch.ones(4, 4)}}):
        torch.save(content, file)
        with pytest.raises(CheckpointError, match=r"state\.pt"):
            infinity.load_pretrained(nn.Linear(4, 4), file, config=config)


def test_a_full_drive_is_an_error(llama: Path, small_tmpfs: Callable[[int], Path]) -> None:
    drive = small_tmpfs(1 << 16)
    with pytest.raises(infinity.errors.StorageError, match="small"):
        infinity.load_pretrained(
            transformers.LlamaForCausalLM, llama, config=everything_on_nvme(drive), dtype=torch.float64
        )


def test_a_file_larger_than_memory_can_be_looked_at(config: dict[str, Any], tmp_path: Path) -> None:
    import psutil

    rows = psutil.virtual_memory().total // 4096 + 4096
    file = tmp_path / "model.safetensors"
    file.write_bytes(_header({"weight": _entry(0, rows * 4096, [rows, 1024])}, 0))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size + rows * 4096)
    with torch.device("meta"):
        model = nn.Linear(1024, rows, bias=False)
    infinity.load_pretrained(model, file, config=config)
    assert model.weight[-1].sum() == 0


def test_a_class_of_an_earlier_transformers_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(ModelError, match=r"needs transformers 5 or later.*pip install 'transformers>=5'"):
        infinity.load_pretrained(transformers.LlamaForCausalLM, tmp_path)
