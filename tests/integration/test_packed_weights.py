"""Frozen weights that are stored packed: the bits of plain torch with the rounded weights, wherever they rest; and files of
bases that are quantized already."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import infinity
from infinity.errors import CheckpointError, ConfigError, ModelError
from infinity.packed.sources import source_of
from tests.exactness.lockstep import engine_on_nvme, everything_on_nvme
from tests.internals import saved as saved_files
from tests.quantized import quantize
from tests.small_transformers import MODELS
from tests.stand_in.models import llama
from tests.twins import Twins

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

_WIDTHS = {"hidden_size": 64, "intermediate_size": 160}


def _adapted(*names: str, seed: int = 1, **options: Any) -> Any:
    model = llama(**_WIDTHS)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    adapted = peft.get_peft_model(model, config, adapter_name=(names or ("default",))[0])
    for name in names[1:]:
        adapted.add_adapter(name, config)
    return adapted


def _tokens(number: int) -> torch.Tensor:
    return torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(number))


def _loss(number: int) -> Any:
    return lambda model: model(input_ids=_tokens(number), labels=_tokens(number)).loss


def _twins(directory: Path, model: Any, frozen_dtype: Any = "nf4", *, is_tight: bool = True, **changes: Any) -> Twins:
    plain = quantize(copy.deepcopy(model), frozen_dtype)
    changes["infinity"] = {**changes.pop("infinity", {}), "frozen_dtype": frozen_dtype}
    return Twins(directory, model, plain=plain, is_tight=is_tight, **changes)


def _train(both: Twins, num_steps: int = 2) -> None:
    for number in range(num_steps):
        both.step(_loss(number))


@pytest.mark.parametrize("budget", ["least", "some", "all"])
def test_lora_on_nf4_at_any_budget(budget: str, tmp_path: Path) -> None:
    changes = {"some": {"keep_in_memory": True, "host_memory_budget": "1MB"}, "all": {"keep_in_memory": True}}
    with _twins(tmp_path, _adapted(), is_tight=budget == "least", infinity=changes.get(budget, {})) as both:
        _train(both)
        both.require_equal()
        with torch.no_grad():
            found = both.engine.generate(input_ids=_tokens(9), max_new_tokens=3, do_sample=False)
            assert torch.equal(found, both.plain.generate(input_ids=_tokens(9), max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "bf16"])
def test_lora_on_other_formats(name: str, tmp_path: Path) -> None:
    with _twins(tmp_path, _adapted(), name) as both:
        _train(both)
        both.require_equal()


def test_dora_and_several_adapters(tmp_path: Path) -> None:
    with _twins(tmp_path, _adapted("one", "two", use_dora=True)) as both:
        _train(both)
        both.change(lambda model, _: model.set_adapter("two"))
        with torch.no_grad():
            assert torch.equal(*(model(input_ids=_tokens(5)).logits for model, _ in both.sides))


def test_checkpointing_and_bytes(tmp_path: Path) -> None:
    model = _adapted()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    with _twins(tmp_path, model, infinity={"update": "step"}) as both:
        _train(both, 3)
        predicted = both.engine.plan.predicted_read_bytes_per_step
        both.step(_loss(7))
        assert both.engine.report.read_bytes == predicted


def test_the_vertical_schedule(tmp_path: Path) -> None:
    model = _adapted()
    plain = quantize(copy.deepcopy(model))
    engine = engine_on_nvme(
        tmp_path,
        model,
        {
            "gradient_accumulation_steps": 2,
            "infinity": {"schedule": "vertical", "frozen_dtype": "nf4"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        },
    )
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True)
    with engine:
        for step in range(2):
            batches = [{"input_ids": _tokens(2 * step + i), "labels": _tokens(2 * step + i)} for i in range(2)]
            engine.train_batch(iter(batches))
            for batch in batches:
                (plain(**batch).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert engine.report.schedule == "vertical"
        weights = engine.module.state_dict()
        assert [name for name, value in plain.state_dict().items() if not torch.equal(weights[name], value)] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_16_bits_as_without_packing(dtype: torch.dtype, tmp_path: Path) -> None:
    """That an unpacked base of these values trains as in plain torch, other tests see."""
    key = "bf16" if dtype == torch.bfloat16 else "fp16"
    losses = []
    for frozen_dtype, model in (("nf4", _adapted()), (None, quantize(_adapted(), dtype=dtype))):
        changes = {key: {"enabled": True}, "infinity": {"frozen_dtype": frozen_dtype}}
        with engine_on_nvme(tmp_path, model, changes) as engine:
            for number in range(2):
                losses.append(engine(input_ids=_tokens(number), labels=_tokens(number)).loss)
                engine.backward(losses[-1])
                engine.step()
    assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))


@pytest.mark.parametrize("is_resident", [False, True])
def test_a_write_that_cannot_be_packed_is_undone_and_an_error(is_resident: bool, tmp_path: Path) -> None:
    with _twins(tmp_path, _adapted(), is_tight=not is_resident, infinity={"keep_in_memory": is_resident}) as both:
        weight = both.model.get_parameter("base_model.model.model.layers.0.self_attn.v_proj.weight")
        with pytest.raises(ModelError, match="stored as nf4"):
            both.model.merge_adapter()
        for write in (
            lambda: weight.data.mul_(1.01),
            lambda: weight.data.copy_(torch.full_like(weight, float("nan"))),
            lambda: _write_gathered(weight),
        ):
            with torch.no_grad(), pytest.raises(ModelError, match=r"stored as nf4.*call engine\.close"):
                write()
        with torch.no_grad():
            weight.data.copy_(weight.data.clone())  # what it is already
            weight.data.mul_(2.0)  # NF4 times a power of two is NF4
            both.plain.get_parameter("base_model.model.model.layers.0.self_attn.v_proj.weight").mul_(2.0)
        _train(both)
        both.require_equal()
        both.engine.close()
        merged, expected = both.model.merge_and_unload(), both.plain.merge_and_unload()
        with torch.no_grad():
            assert torch.equal(merged(input_ids=_tokens(1)).logits, expected(input_ids=_tokens(1)).logits)


def _write_gathered(weight: nn.Parameter) -> None:
    with infinity.GatheredParameters(weight, modifier_rank=0):
        weight.add_(0.125)


def test_values_that_are_not_finite_are_refused_and_come_back(tmp_path: Path) -> None:
    model = _adapted()
    before = copy.deepcopy(model.state_dict())
    bad = model.get_parameter("base_model.model.model.layers.1.self_attn.v_proj.weight")
    bad.data[3, 3] = float("inf")
    before["base_model.model.model.layers.1.self_attn.v_proj.weight"][3, 3] = float("inf")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_proj\.weight.*NaN or infinite"):
        engine_on_nvme(tmp_path, model, {"infinity": {"frozen_dtype": "nf4"}})
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []


def test_patterns_choose_formats(tmp_path: Path) -> None:
    patterns = {"lm_head": "bf16", "*.mlp.*": "nf4", "q_proj": "int8"}
    with engine_on_nvme(tmp_path, _adapted(), {"infinity": {"frozen_dtype": patterns}}) as engine:
        packed = {slot.spec.fqn: slot.spec.packed for unit in engine._parts.plan.units for slot in unit.layout.slots}
        named = {fqn.replace(".base_layer", "").split(".")[-2]: name for fqn, name in packed.items() if name}
        assert named == {"gate_proj": "nf4", "up_proj": "nf4", "down_proj": "nf4", "q_proj": "int8", "lm_head": "bf16"}


def test_a_pattern_that_means_nothing_is_an_error(tmp_path: Path) -> None:
    for pattern, words in (("nowhere", "matches no parameter"), ("*embed_tokens*", "none of them can be packed")):
        with pytest.raises(ConfigError, match=words):
            engine_on_nvme(tmp_path, _adapted(), {"infinity": {"frozen_dtype": {pattern: "nf4"}}})


def test_tied_heads_stay_as_they_are(tmp_path: Path) -> None:
    model = llama(**_WIDTHS, tie_word_embeddings=True).requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    head = model.lm_head.weight.detach().clone()
    engine = engine_on_nvme(tmp_path, model, {"infinity": {"frozen_dtype": "nf4"}})
    with engine, infinity.GatheredParameters(model.lm_head.weight):
        assert torch.equal(model.lm_head.weight, head)


def test_checkpoints_record_the_base_and_refuse_another(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    with _twins(tmp_path / "nvme", _adapted()) as both:
        _train(both, 1)
        both.engine.save_checkpoint(str(tmp_path / "saved"))
        _train(both, 1)
        wanted = {name: value.clone() for name, value in both.plain.state_dict().items()}
        config = dict(both.engine.config)
    size = sum(path.stat().st_size for path in (tmp_path / "saved").rglob("*") if path.is_file())
    assert size < 1 << 20

    def loaded(model: Any, **changes: Any) -> Any:
        found = {**config, "infinity": {**config["infinity"], **changes}}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        engine, *_ = infinity.initialize(model=model, optimizer=optimizer, config=found)
        return engine

    with loaded(_adapted(seed=3)) as engine:  # other adapters over the same base
        engine.load_checkpoint(str(tmp_path / "saved"))
        engine.backward(engine(input_ids=_tokens(0), labels=_tokens(0)).loss)
        engine.step()
        weights = engine.module.state_dict()
        assert [name for name, value in wanted.items() if not torch.equal(weights[name], value)] == []
    for other in ("int8", None):
        words = r"stored as nf4.*frozen_dtype to the value of that run"
        with loaded(_adapted(), frozen_dtype=other) as engine, pytest.raises(ModelError, match=words):
            engine.load_checkpoint(str(tmp_path / "saved"))
    model = _adapted()
    model.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight").data.mul_(1.5)
    with loaded(model) as engine, pytest.raises(ModelError, match="have other values now"):
        engine.load_checkpoint(str(tmp_path / "saved"))


@pytest.mark.parametrize("frozen_dtype", ["nf4", None])
def test_a_save_reads_only_base_weights_that_changed_since_the_last(frozen_dtype: str | None, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.weight"
    model = _adapted()
    engine = engine_on_nvme(tmp_path, model, {"infinity": {"frozen_dtype": frozen_dtype}})

    def saved(tag: str) -> tuple[int, dict[str, tuple[str, int]]]:
        before = _bytes_read()
        engine.save_checkpoint(tmp_path / "saved", tag, exclude_frozen_parameters=True)
        found = saved_files.Checkpoint.open(tmp_path / "saved", tag).omitted.checksums
        return _bytes_read() - before, found

    with engine:
        first, checksums = saved("first")
        again, unchanged = saved("again")
        assert unchanged == checksums
        with infinity.GatheredParameters(model.get_parameter(name), modifier_rank=0):
            model.get_parameter(name).zero_()
        written, changed = saved("written")
        assert {fqn for fqn in checksums if changed[fqn] != checksums[fqn]} == {name}
        assert again < written < first / 2
        engine.load_checkpoint(tmp_path / "saved", "written")
        with pytest.raises(ModelError, match="have other values now"):
            engine.load_checkpoint(tmp_path / "saved", "first")


def _bytes_read() -> int:
    """By this process from files and pipes, as counted by the kernel at each call."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def test_thawed_weights_become_ordinary(tmp_path: Path) -> None:
    with _twins(tmp_path, _adapted(), is_tight=False) as both:
        _train(both, 1)
        name = "base_model.model.model.layers.0.self_attn.v_proj.weight"

        def thaw(model: Any, optimizer: Any) -> None:
            model.get_parameter(name).requires_grad_(True)
            optimizer.add_param_group({"params": [model.get_parameter(name)]})

        both.change(thaw)
        _train(both, 2)
        both.require_equal()


@pytest.mark.parametrize("experts", ["by_expert", "whole"])
def test_experts_that_are_one_tensor(experts: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS["mixtral"]().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    changes = {"infinity": {"frozen_dtype": "nf4", "experts": experts}}
    with Twins(tmp_path, model, plain=quantize(copy.deepcopy(model)), **changes) as both:
        specs = [slot.spec for unit in both.engine._parts.plan.units for slot in unit.layout.slots]
        assert {spec.packed for spec in specs if len(spec.shape) == 3} == {"nf4"}
        _train(both)
        both.require_equal()


_TOKENS = torch.arange(24).view(2, 12)


def _fp8_files(directory: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A base whose linear layers are in FP8, with scales that packing anew would not give; and its plain weights."""
    model = llama(**_WIDTHS).to(dtype)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    plain = dict(tensors)
    for name, value in list(tensors.items()):
        if "_proj.weight" in name:
            scales = torch.rand(tuple(-(-size // 128) for size in value.shape)) / 100 + 0.001
            of_each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
            codes = (value.float() / of_each).to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            plain[name] = (codes.float() * of_each).to(dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return plain


def _trained(model: Any, directory: Path, frozen_dtype: Any) -> list[torch.Tensor]:
    """Losses and logits, with the norms trained over a frozen base."""
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    changes = {"bf16": {"enabled": True}, "infinity": {"frozen_dtype": frozen_dtype}}
    engine = engine_on_nvme(directory, model, changes)
    seen = []
    with engine:
        for _ in range(2):
            loss = engine(input_ids=_TOKENS, labels=_TOKENS).loss
            engine.backward(loss)
            engine.step()
            seen.append(loss.detach())
        with torch.no_grad():
            return [*seen, engine(input_ids=_TOKENS).logits]


def test_fp8_files_are_stored_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    plain = _fp8_files(tmp_path / "base")
    config = everything_on_nvme(tmp_path / "nvme", {"bf16": {"enabled": True}})
    loaded = infinity.load_pretrained(AutoModelForCausalLM, tmp_path / "base", config=config, dtype=torch.bfloat16)
    assert isinstance(loaded, LlamaForCausalLM)
    weights = loaded.state_dict()
    assert [name for name, value in plain.items() if not torch.equal(weights[name], value)] == []
    llama(**_WIDTHS).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    packed = _trained(
        loaded, tmp_path / "nvme", {"lm_head": "bf16", "*": "fp8_e4m3"}
    )  # the head is not quantized there
    for found, wanted in zip(packed, _trained(expected, tmp_path / "nvme", None), strict=True):
        assert torch.equal(found, wanted)


def test_files_are_unpacked_to_the_dtype_of_the_config(tmp_path: Path) -> None:
    """Not to bf16 and then to it: the values would be rounded twice, and packed anew from that."""
    plain = _fp8_files(tmp_path / "base", torch.float16)
    loaded = infinity.load_pretrained(AutoModelForCausalLM, tmp_path / "base")
    weights = loaded.state_dict()
    assert [name for name, value in plain.items() if not torch.equal(weights[name], value)] == []
    for name, parameter in loaded.named_parameters():
        if "_proj.weight" in name:
            num_tiles = -(-parameter.shape[0] // 128) * -(-parameter.shape[1] // 128)
            assert source_of(parameter, "fp8_e4m3", parameter.numel() + 4 * num_tiles) is not None, name


def test_other_methods_are_named(tmp_path: Path) -> None:
    _fp8_files(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"GPTQ.*frozen_dtype"):
        infinity.load_pretrained(AutoModelForCausalLM, tmp_path / "base")
