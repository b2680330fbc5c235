"""`infinity plan`: its figures are the engine's own, and it says what to change."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import infinity
from infinity.cli.main import main
from infinity.config import load_config
from infinity.errors import ConfigError, OptimizerNotPageableError, StorageError
from infinity.machine.here import room_bytes
from infinity.plan import ladder as ladder_module
from infinity.plan.ladder import Ladder
from infinity.plan.machine import Bandwidth, Machine
from infinity.plan.model_shapes import ModelRefused, add_adapters, read_model
from swapper.volumes.run_directory import bytes_of_run
from tests.small_transformers import make

_SMALL = Machine(host_free_bytes=4 * 10**9, drive_free_bytes=10**12, device_free_bytes=None)


def _config(path: Path, **more: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(path)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        **more,
    }


def _llama() -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 6, "num_attention_heads": 4}
    return make("LlamaForCausalLM", **sizes, vocab_size=1000)


def _gpt2() -> nn.Module:
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return make("GPT2LMHeadModel", n_embd=128, n_layer=5, n_head=4, vocab_size=900, **ids)


def _plain() -> nn.Module:
    return nn.Sequential(nn.Embedding(700, 96), *[nn.Linear(96, 96) for _ in range(7)], nn.Linear(96, 700))


def _ladder(path: Path, config: Any, machine: Machine = _SMALL, make: Any = _plain) -> Ladder:
    with torch.device("meta"):
        return Ladder(make(), config, machine, str(path), tokens=64)


def _train(engine: Any) -> None:
    """Two steps: from then on, the engine's plan knows in which order units are needed."""
    tokens = torch.arange(32).reshape(2, 16)
    for _ in range(2 * engine.gradient_accumulation_steps()):
        out = engine(tokens)
        engine.backward((out if isinstance(out, torch.Tensor) else out.logits).float().square().mean())
        engine.step()


_CASES = {
    "clipped": (_llama, {"infinity": {"host_memory_budget": "6MB"}}),
    "int8": (_gpt2, {"infinity": {"host_memory_budget": "6MB", "state_dtype": "int8"}, "gradient_clipping": 0}),
    "accumulated": (_llama, {"infinity": {"host_memory_budget": "20MB"}, "gradient_accumulation_steps": 3}),
    "tiles": (_plain, {"infinity": {"host_memory_budget": "6MB", "tile_above": "64KiB"}}),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize(("make", "changes"), _CASES.values(), ids=_CASES)
def test_bytes_are_those_of_the_engine(make: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    config = _config(tmp_path, **changes)
    told = _ladder(tmp_path, config, make=make).given().plan
    for building in (contextlib.nullcontext, functools.partial(infinity.Init, config_dict_or_path=config)):
        with building():
            model = make()
        engine, *_ = infinity.initialize(model=model, config=config)
        with engine:
            assert told.resting_bytes == engine.plan.resting_bytes
            assert told.minimum_budget_bytes == engine.plan.minimum_budget_bytes
            assert told.placement == engine.plan.placement
            _train(engine)
            assert told.prediction[:2] == pytest.approx(engine.plan.prediction[:2], rel=0.01)


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int) -> Any:
    assert main(["plan", *arguments, "--json", "--no-measure"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_described_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described = ["--ram", "32GB", "--disk", "1TB", "--drive-speed", "2GB", "--tflops", "10", "--tbw", "600"]
    found = _json(["--params", "7b", "--nvme-path", str(tmp_path), *described], capsys, 0)
    chosen = found["chosen"]
    assert (chosen["param_tier"], chosen["optimizer_tier"]) == ("none", "nvme")
    moved = chosen["read_bytes_per_step"] + chosen["write_bytes_per_step"]
    compute = 6 * 7e9 * 2048 / 10e12
    assert chosen["step_seconds"] == pytest.approx(max(moved / 2e9, compute))
    assert chosen["drive_life_steps"] == int(600e12 / chosen["write_bytes_per_step"])
    assert [each["fits"] for each in found["choices"]] == [False, True, True]
    rests = [size for kinds in chosen["resting_bytes"].values() for kind, size in kinds.items() if kind != "gradients"]
    assert sum(rests) == pytest.approx(12 * 7e9, rel=0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
def test_what_does_not_fit_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--ram", "32GB", "--disk", "70GB", "--nvme-path", str(tmp_path)]
    found = _json(["--params", "7b", *machine], capsys, 1)
    assert found["chosen"]["problem"].endswith("are free")
    assert found["smallest_change"] == {"infinity.state_dtype": "bf16"}
    file = tmp_path / "config.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero}))
    machine = ["--ram", "32GB", "--disk", "1TB", "--gpu", "24GB", "--nvme-path", str(tmp_path)]
    found = _json(["--params", "7b", "--config", str(file), *machine], capsys, 1)
    assert found["smallest_change"]["zero_optimization.offload_optimizer.device"] == "nvme"
    assert "GPU memory for weights: " in found["choices"][0]["problem"]  # 84 GB of weights and states
    assert main(["plan", "--params", "7b", "--config", str(file), *machine, "--no-measure"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "It does not fit" in out and "zero_optimization.offload_optimizer.device = nvme" in out


def test_the_change_that_is_told_fits(tmp_path: Path) -> None:
    assert _ladder(tmp_path, _config(tmp_path), make=_llama).given().fits
    little = Machine(host_free_bytes=20_000_000, drive_free_bytes=10**12, device_free_bytes=None)
    ladder = _ladder(tmp_path, _config(tmp_path, zero_optimization={"stage": 3}), little, _llama)
    refused = ladder.given()
    assert not refused.fits
    change = ladder.smallest_change(refused)
    assert change is not None and change.fits
    assert ladder.outcome(change.changes).fits


@pytest.mark.parametrize("ours", [{"durable": True}, {"activations": "nvme"}], ids=str)
def test_tiers_that_do_not_go_with_the_config_are_left_out(
    ours: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(_config(tmp_path, infinity=ours)))
    found = _json(["--params", "100m", "--config", str(file), "--ram", "32GB", "--disk", "1TB"], capsys, 0)
    tiers = [(each["param_tier"], each["optimizer_tier"]) for each in found["choices"]]
    assert tiers == ([("nvme", "nvme")] if "durable" in ours else [("none", "nvme"), ("nvme", "nvme")])
    file.write_text(json.dumps({"train_batch_size": 1, "infinity": ours}))
    assert main(["plan", "--params", "100m", "--config", str(file), "--no-measure"]) == 1
    told = capsys.readouterr().err
    assert ("zero_optimization.offload_param.device" if "durable" in ours else "infinity.activations") in told


_PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": ({"capacity": "1MiB"}, "3MiB"),
    "the drive of weights": ({"capacity": "64KiB", "of": "offload_param"}, "1MiB"),
    "the drive of states": ({"capacity": "1MiB", "of": "offload_optimizer"}, "3MiB"),
    "versions": ({"capacity": "4MiB", "durable": True}, "16MiB"),
}


@pytest.mark.deep
@pytest.mark.parametrize(("little", "enough"), _PLACES.values(), ids=_PLACES)
def test_what_is_told_of_drives_is_what_the_engine_finds(little: dict[str, Any], enough: str, tmp_path: Path) -> None:
    def config(capacity: str) -> dict[str, Any]:
        limited = {"device": "nvme", "nvme_path": {"path": str(tmp_path / "limited"), "capacity": capacity}}
        zero = {"stage": 3, "offload_param": limited, "offload_optimizer": limited}
        if "of" in little:
            free = {"device": "nvme", "nvme_path": str(tmp_path / "free")}
            zero = {"stage": 3, "offload_param": free, "offload_optimizer": free, little["of"]: limited}
        ours = {"durable": True} if little.get("durable") else {"keep_in_memory": False}
        return _config(tmp_path, zero_optimization=zero, infinity=ours)

    refused = _ladder(tmp_path, config(little["capacity"])).given()
    assert refused.problem is not None and "are free" in refused.problem and "limited" in refused.problem
    assert not list(_ladder(tmp_path, config(little["capacity"])).rungs())[-1].fits  # a directory keeps its capacity
    with pytest.raises(StorageError):
        infinity.initialize(model=_plain(), config=config(little["capacity"]))
    assert _ladder(tmp_path, config(enough)).given().fits
    infinity.initialize(model=_plain(), config=config(enough))[0].close()


def test_a_run_that_is_there_has_its_space(tmp_path: Path) -> None:
    config = _config(tmp_path, infinity={"durable": True})
    infinity.initialize(model=_plain(), config=config)[0].close()
    places = load_config(config).infinity.durable
    held = room_bytes(places.directories)
    assert _SMALL.room_bytes(places.directories) == _SMALL.drive_free_bytes
    written = (tmp_path / "durable" / "states-1-of-1").stat().st_blocks * 512
    assert bytes_of_run(tmp_path / "durable") == written > 0
    assert held is not None and held > written


@pytest.mark.deep(but=2)
@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        ("Adagrad", {"infinity.state_dtype": "int8"}),
        ("Lamb", {"infinity.state_dtype": "bf16"}),
        ("Lamb", {"infinity.tile_above": "32KiB"}),
    ],
)
def test_a_change_that_the_optimizer_does_not_allow_does_not_fit(
    optimizer: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    config = _config(tmp_path, optimizer={"type": optimizer, "params": {"lr": 1e-3}})
    ladder = _ladder(tmp_path, config)
    assert ladder.given().fits
    refused = ladder.outcome(keys)
    with pytest.raises((ConfigError, OptimizerNotPageableError)) as caught:
        infinity.initialize(model=_plain(), config=load_config(config, overrides=keys))
    assert refused.problem == str(caught.value) and not refused.fits
    assert _ladder(tmp_path, dict(load_config(config, overrides=keys))).given().problem == refused.problem


def test_directories_that_are_given_take_the_place_of_the_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = {"device": "nvme", "nvme_path": {"path": str(tmp_path), "capacity": "1MiB"}}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(_config(tmp_path, zero_optimization=zero, infinity={"keep_in_memory": False})))
    arguments = ["--params", "100m", "--config", str(file), "--ram", "32GB"]
    assert "1048576" in _json(arguments, capsys, 1)["chosen"]["problem"]
    assert _json([*arguments, "--disk", "1TB", "--nvme-path", str(tmp_path)], capsys, 0)["chosen"]["fits"]


@pytest.mark.deep
def test_the_largest_fits_and_one_that_is_larger_does_not(tmp_path: Path) -> None:
    machine = Machine(host_free_bytes=200_000_000, drive_free_bytes=400_000_000, device_free_bytes=None)

    def ladder(num_layers: int) -> Ladder:
        make = lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(num_layers)])  # noqa: E731
        return _ladder(tmp_path, None, machine, make)

    most = ladder(4).largest()
    num_layers, num_parameters = most
    assert num_parameters == num_layers * 512 * 513
    for count, fits in ((num_layers, True), (num_layers + num_layers // 50, False)):
        keys = {
            f"zero_optimization.offload_{name}.{key}": value
            for name in ("param", "optimizer")
            for key, value in (("device", "nvme"), ("nvme_path", str(tmp_path)))
        }
        assert ladder(count).outcome(keys).fits is fits


def test_the_largest_has_no_more_packed_weights_on_the_gpu_than_fit(tmp_path: Path) -> None:
    machine = Machine(host_free_bytes=40_000_000, drive_free_bytes=6_000_000, device_free_bytes=9_000_000)
    config = _config(tmp_path, infinity={"frozen_dtype": "nf4"})

    def ladder(num_layers: int) -> Ladder:
        def make() -> nn.Module:
            model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(num_layers)])
            for layer in model:
                layer.weight.requires_grad_(False)
            return model

        return _ladder(tmp_path, config, machine, make)

    most, _ = ladder(12).largest()
    assert ladder(most).given().fits


@pytest.mark.deep
def test_a_model_is_of_the_class_that_its_config_names(tmp_path: Path) -> None:
    sizes = {
        f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = transformers.BartConfig(d_model=16, vocab_size=64, **sizes)
    with torch.device("meta"):
        meant = transformers.BartForConditionalGeneration(config)
        alone = transformers.BartForCausalLM(config)
    for names, model in ((["BartForConditionalGeneration"], meant), (["pipeline"], alone), (None, alone)):
        config.architectures = names
        config.save_pretrained(tmp_path)
        found = read_model(str(tmp_path))[1]
        assert {k: v.shape for k, v in found.state_dict().items()} == {
            k: v.shape for k, v in model.state_dict().items()
        }


@pytest.mark.deep
def test_a_config_of_several_processes_is_planned_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}
    file.write_text(json.dumps(_config(tmp_path, **sizes)))
    machine = ["--config", str(file), "--ram", "8GB", "--disk", "1TB"]
    several = _json(["--params", "100m", *machine], capsys, 0)
    del sizes["train_batch_size"]
    file.write_text(json.dumps(_config(tmp_path, **sizes)))
    assert several["choices"] == _json(["--params", "100m", *machine], capsys, 0)["choices"]
    file.write_text(json.dumps(_config(tmp_path, **sizes, train_batch_size=63)))
    assert main(["plan", "--params", "100m", *machine]) == 1
    file.write_text(json.dumps(_config(tmp_path, **sizes, train_batch_size=64)))
    assert main(["config", "check", str(file)]) == 1
    assert "--processes 8" in capsys.readouterr().err
    assert main(["config", "check", str(file), "--processes", "8"]) == 0


@pytest.mark.parametrize(
    ("ours", "drive_bytes", "change"),
    [
        ({"host_memory_budget": "3MB"}, 10**6, {"infinity.host_memory_budget": None}),
        ({"keep_in_memory": False}, 10**6, {"infinity.keep_in_memory": True}),
        ({"staging_buffer_bytes": 4096}, 10**12, {"infinity.staging_buffer_bytes": None}),
    ],
    ids=["budget", "keep_in_memory", "staging_buffer_bytes"],
)
def test_a_key_of_memory_is_a_change_that_helps(
    ours: dict[str, Any], drive_bytes: int, change: dict[str, Any], tmp_path: Path
) -> None:
    machine = Machine(host_free_bytes=4 * 10**9, drive_free_bytes=drive_bytes, device_free_bytes=None)
    ladder = _ladder(tmp_path, _config(tmp_path, infinity=ours), machine)
    given = ladder.given()
    assert not given.fits
    found = ladder.smallest_change(given)
    assert found is not None and found.fits and found.differences_from(given) == change


def test_no_time_is_told_where_the_drives_are_unknown(tmp_path: Path) -> None:
    config = _config(tmp_path, infinity={"host_memory_budget": "6MB"})
    assert _ladder(tmp_path, config).given().seconds is None
    fast = Machine(4 * 10**9, 10**12, None, Bandwidth(1e9, 1e9, 1e9, "2026-01-01"), flops_per_second=1e9)
    seconds = _ladder(tmp_path, config, fast).given().seconds
    count = sum(each.numel() for each in _plain().parameters())
    assert seconds == pytest.approx(ladder_module.FLOPS_PER_PARAMETER * count * 64 / 1e9)


@pytest.mark.parametrize(("gpu_bytes", "seconds"), [(None, 5.0), (10**9, 3.0)], ids=["cpu", "gpu"])
def test_updates_by_the_cpu_take_time(gpu_bytes: int | None, seconds: float, tmp_path: Path) -> None:
    count = sum(each.numel() for each in _plain().parameters())
    machine = Machine(
        4 * 10**9,
        10**12,
        gpu_bytes,
        Bandwidth(1e12, 1e12, 1e12, "2026-01-01"),
        flops_per_second=ladder_module.FLOPS_PER_PARAMETER * count * 64 / 2,  # forward and backward in two seconds
        updates_per_second=count / 3,
    )
    assert _ladder(tmp_path, _config(tmp_path), machine).given().seconds == pytest.approx(seconds)


def test_a_model_that_is_frozen_is_planned_as_evaluating(tmp_path: Path) -> None:
    machine = Machine(4 * 10**9, 10**12, None, flops_per_second=1e9)
    given = _ladder(tmp_path, _config(tmp_path), machine, lambda: _plain().requires_grad_(requires_grad=False)).given()
    assert given.fits
    assert (given.plan.num_trainable, given.plan.states_bytes["nvme"]) == (0, 0)
    num_parameters = sum(each.numel() for each in _plain().parameters())
    assert given.plan.compute_seconds == pytest.approx(2 * num_parameters * 64 / 1e9)


_SIZES = {"hidden_size": 64, "num_attention_heads": 3, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"model_type": "bert", **_SIZES}, "not a multiple of the number of attention heads"),
        ({"model_type": "llama", **_SIZES, "hidden_size": 3 * 10**8}, "at most 1e\\+14 parameters"),
        ([1], "It has to be the config.json of a model"),
    ],
    ids=str,
)
def test_why_no_model_can_be_made_of_a_config(content: Any, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match=told):
        read_model(str(tmp_path))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # of PEFT
def test_adapters_on_gpt2_are_those_of_peft() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(_gpt2(), peft.LoraConfig(r=4, target_modules="all-linear", fan_in_fan_out=True))
    found = [sum(each.numel() for each in model.parameters()) for model in (add_adapters(_gpt2(), 4), adapted)]
    assert found[0] == found[1]


def test_a_base_of_70b_with_adapters_fits_on_one_card_packed(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--ram", "64GB", "--disk", "1TB", "--drive-speed", "6GB", "--gpu", "24GB", "--tflops", "80", "--json"]
    found = {}
    for frozen_dtype in ("nf4", "bf16"):
        main(["plan", "--params", "70b", "--lora", "16", "--frozen-dtype", frozen_dtype, *machine])
        found[frozen_dtype] = json.loads(capsys.readouterr().out)
    packed, plain = (
        next(each for each in found[name]["choices"] if each["param_tier"] == each["optimizer_tier"] == "cpu")
        for name in found
    )
    assert packed["fits"] and not plain["fits"]
