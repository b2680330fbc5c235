"""What a save leaves in its directory: at any moment, after whatever was there before, and of models that have changed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import ModelError, StorageError
from tests.exactness.lockstep import SHAPES_BY_NAME, Lockstep, engine_on_nvme
from tests.internals import publish
from tests.small_transformers import are_equal, read_weights

_OLD_PICKLE = "pytorch_model.bin"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[Any, nn.Sequential]]:
    drive = tmp_path / "drive"
    drive.mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with engine_on_nvme(drive, model) as engine:
        yield engine, model


def _write_old(folder: Path, kind: str, values: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    if kind == "single":
        save_file(values, folder / "model.safetensors")
    if kind == "pickled":
        torch.save(values, folder / _OLD_PICKLE)
    if kind.startswith("sharded"):
        count = int(kind.removeprefix("sharded "))
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        for name in names[1:]:
            save_file({}, folder / name)
        save_file(values, folder / names[0])
        index = {"metadata": {}, "weight_map": dict.fromkeys(values, names[0])}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("kind", ["single", "pickled", "sharded 4", "sharded 2"])
def test_a_crash_at_any_moment_leaves_the_old_weights_or_the_new_ones(
    kind: str, started: tuple[Any, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = started
    folder = tmp_path / "out"
    old = {"0.weight": torch.full((2, 2), 7.0)}
    _write_old(folder, kind, old)
    images: list[Path] = []
    synced: set[int] = set()
    moved: list[tuple[int, bool]] = []

    def photographed(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*paths: Path) -> None:
            if len(paths) == 2:
                assert paths[0].stat().st_ino in synced, f"{paths[1].name} was moved before it was on the drive"
            change(*paths)
            images.append(tmp_path / f"image{len(images)}")
            shutil.copytree(folder, images[-1])

        return changed

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        if os.fstat(descriptor).st_ino == folder.stat().st_ino:
            moved.append((len(images), True))

    monkeypatch.setattr(publish, "rename", photographed(publish.rename))
    monkeypatch.setattr(publish, "remove", photographed(publish.remove))
    monkeypatch.setattr(os, "fsync", fsync)
    engine.save_16bit_model(folder, max_shard_size=1)
    new = read_weights(folder)
    assert new.keys() == engine.module.state_dict().keys()
    states = [are_equal(read_weights(image), new) for image in images]
    assert all(is_new or are_equal(read_weights(image), old) for is_new, image in zip(states, images, strict=True))
    assert states == sorted(states), "new weights, then old ones again"
    # The names of the shards are on the drive before the index refers to them, and that before anything is removed.
    num_shards = len({path.name for path in folder.glob("model-*.safetensors")})
    syncs = {number for number, _ in moved}
    assert {num_shards, num_shards + 1, len(images)} <= syncs
    leftovers = {path.name for path in folder.iterdir()} - {path.name for path in folder.glob("model-*.safetensors")}
    assert leftovers == {"model.safetensors.index.json", *([_OLD_PICKLE] if kind == "pickled" else [])}


def test_savers_at_the_same_time_leave_one_whole_save(tmp_path: Path) -> None:
    """Two stages of one pipeline that write to the same place: whoever is last has it, and nothing is mixed."""
    folder, errors = tmp_path / "out", []
    barrier = threading.Barrier(2)

    def save(value: float) -> None:
        try:
            for _ in range(15):
                barrier.wait()
                with publish.Staging(folder, "model") as staging:
                    for number in range(3):
                        with staging.file(f"{number}") as file:
                            file.write(f"{value}".encode())
                    with publish.locked(folder):
                        there = {path.name for path in folder.iterdir()}
                        turn = next(turn for turn in range(99) if f"s-{turn}-0" not in there)
                        names = [(f"{number}", f"s-{turn}-{number}") for number in range(3)]
                        with staging.file("head") as file:
                            file.write(json.dumps([name for _, name in names]).encode())
                        staging.publish(names, [], ("head", "head"), lambda name: name.startswith("s-"))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=save, args=(float(number),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    shards = json.loads((folder / "head").read_text())
    assert len({(folder / name).read_text() for name in shards}) == 1
    assert {path.name for path in folder.iterdir()} == {"head", *shards}


@pytest.mark.parametrize(
    "buffer", [torch.ones(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.ones(2, device="meta")]
)
def test_a_buffer_that_the_format_has_not_is_refused(
    buffer: torch.Tensor, started: tuple[Any, nn.Module], tmp_path: Path
) -> None:
    engine, model = started
    model.register_buffer("odd", buffer)
    with pytest.raises(ModelError, match="'odd' cannot be written"):
        engine.save_16bit_model(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _llama(**changes: Any) -> Any:
    pytest.importorskip("transformers")
    from tests.stand_in.models import llama

    return llama(**changes)


def test_weights_that_transformers_ties_are_written_once(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    drive = tmp_path / "drive"
    drive.mkdir()
    model = _llama(tie_word_embeddings=True)
    with engine_on_nvme(drive, model) as engine:
        tokens = torch.arange(8).view(1, 8)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.save_16bit_model(tmp_path / "out")
        logits = engine.eval()(input_ids=tokens).logits.detach()
    assert "lm_head.weight" not in read_weights(tmp_path / "out")
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, logits)


def _adapted(model: Any, *, mixed: bool = False, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, **options), mixed=mixed)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_peft_model_is_saved_as_its_adapters_which_load(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    drive, out = tmp_path / "drive", tmp_path / "out"
    drive.mkdir()
    model = _adapted(_llama())
    tokens = torch.arange(8).view(1, 8)
    with engine_on_nvme(drive, model) as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.save_16bit_model(out)
        logits = engine.eval()(input_ids=tokens).logits.detach()
    assert {path.name for path in out.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (out / "config.json").exists() and not list(out.glob(".*"))
    loaded = peft.PeftModel.from_pretrained(_llama(), out)
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, logits)


_KINDS: dict[str, dict[str, Any]] = {
    "biases": {"kind": "LoraConfig", "target_modules": ["q_proj"], "r": 2, "bias": "all"},
    "a trained head": {"kind": "LoraConfig", "target_modules": ["q_proj"], "r": 2, "modules_to_save": ["lm_head"]},
    "embeddings": {"kind": "LoraConfig", "target_modules": ["embed_tokens"], "r": 2},
    "prompts": {"kind": "AdaptionPromptConfig", "adapter_len": 4, "adapter_layers": 1, "task_type": "CAUSAL_LM"},
    "a prefix": {"kind": "PrefixTuningConfig", "num_virtual_tokens": 2, "task_type": "CAUSAL_LM"},
    "vectors": {"kind": "VBLoRAConfig", "target_modules": ["q_proj"], "num_vectors": 4, "vector_length": 4, "topk": 2},
    "projections": {"kind": "VeraConfig", "target_modules": ["q_proj"], "r": 2},
}


@pytest.mark.deep(but=1)
@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("what", _KINDS)
def test_kinds_of_adapters(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As PEFT saves them, without a state dict of the whole model."""
    peft = pytest.importorskip("peft")
    drive, options = tmp_path / "drive", dict(_KINDS[what])
    drive.mkdir()
    model = peft.get_peft_model(_llama(), getattr(peft, options.pop("kind"))(**options))
    if what == "vectors":
        next(iter(model.peft_config.values())).save_only_topk_weights = True
    model.save_pretrained(tmp_path / "theirs")
    engine = engine_on_nvme(drive, model)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a state dict of the whole model")

    with engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "state_dict", refuse)
            for _ in range(2):
                engine.save_16bit_model(tmp_path / "ours")
        assert caplog.text.count("got the adapters alone") == 1 and "merge_and_unload" in caplog.text
        [expected, found] = [
            (tmp_path / each / "adapter_model.safetensors").read_bytes() for each in ("theirs", "ours")
        ]
        assert found == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("what", ["trained", "mixed", "merged"])
def test_a_peft_model_that_is_not_adapters_of_one_kind_is_refused(what: str, tmp_path: Path) -> None:
    model = _adapted(_llama(), mixed=what == "mixed")
    model.get_input_embeddings().weight.requires_grad_(what == "trained")
    message = {
        "trained": "embed_tokens.weight' is trained, but belongs to no adapter",
        "mixed": "of several kinds.*state_dict",
        "merged": r"merge_and_unload\(\) returned",
    }
    if what == "merged":
        model.merge_and_unload()
    with engine_on_nvme(tmp_path, model) as engine:
        for save in (engine.save_16bit_model, engine.save_pretrained):
            with pytest.raises(ModelError, match=message[what]):
                save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_directory_is_not_made_into_one(tmp_path: Path) -> None:
    with engine_on_nvme(tmp_path, nn.Linear(4, 4)) as engine:
        for save in (engine.save_16bit_model, engine.save_pretrained, engine.save_fp32_model):
            with pytest.raises(ValueError, match="the directory is empty"):
                save("")
        for call in (engine.save_pretrained, engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(ValueError, match=r"'s3://bucket/run' is an address"):
                call("s3://bucket/run")
            with pytest.raises(ValueError, match="is an address"):
                call(Path("s3://bucket/run"))


def test_deepspeeds_file_name_gives_what_transformers_looks_for(tmp_path: Path) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["plain"]) as both:
        both.engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
        for name in ("..", str(tmp_path / "elsewhere.safetensors"), "../elsewhere.safetensors", "a/b.safetensors", "."):
            with pytest.raises(ValueError, match="save_filename must be the name of a file"):
                both.engine.save_16bit_model(tmp_path / "out", name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "elsewhere.safetensors").exists()


def test_every_dtype_and_shape_is_read_back_by_the_library(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))
            self.nothing = torch.nn.Parameter(torch.empty(0, 3))
            self.weight = torch.nn.Parameter(torch.randn(5, 3).t())
            self.frozen = torch.nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
            self.register_buffer("strided", torch.randn(4, 6)[:, ::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight * self.scale).sum()

    torch.manual_seed(0)
    model = Odd()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    drive = tmp_path / "drive"
    drive.mkdir()
    with engine_on_nvme(drive, model) as engine:
        engine.save_16bit_model(tmp_path / "out")
    assert are_equal(read_weights(tmp_path / "out"), expected)


@pytest.mark.root
def test_a_full_disk_leaves_the_weights_of_before(tmp_path: Path, small_tmpfs: Callable[[int], Path]) -> None:
    with Lockstep.start(tmp_path, case=SHAPES_BY_NAME["plain"]) as both:
        num_bytes = sum(p.numel() * p.element_size() for p in both.reference.model.parameters())
        folder = small_tmpfs(num_bytes + num_bytes // 2) / "weights"
        both.engine.save_16bit_model(folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        both.engine_step(0)
        with pytest.raises(StorageError, match="No space left") as caught:
            both.engine.save_16bit_model(folder)
        assert str(folder) in str(caught.value) and "free" in str(caught.value)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        both.engine_step(1)
        both.require_equal()
