"""``python -m infinity import-deepspeed``: a training that DeepSpeed began goes on here.

The checkpoints were written by DeepSpeed 0.19, see ``tests/deepspeed_checkpoints``.
"""

from __future__ import annotations

import dataclasses
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint.saved import Checkpoint
from infinity.cli.main import main
from infinity.deepspeed.importer.conversion import convert
from infinity.deepspeed.importer.pickles import read
from infinity.errors import CheckpointError
from infinity.torch_internals.pickles import Record
from tests.deepspeed_checkpoints.write import (
    KEPT,
    NUM_STEPS_AFTER,
    NUM_STEPS_BEFORE,
    Case,
    build,
    config_of,
    param_groups,
    train,
)
from tests.exactness.lockstep import everything_on_nvme

_HERE = Path(__file__).parents[2] / "deepspeed_checkpoints"


def _unpacked(name: str, directory: Path) -> Path:
    with tarfile.open(_HERE / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture(params=KEPT)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Case]:
    """Directory of a checkpoint and of what is expected of it."""
    return _unpacked(request.param, tmp_path / "deepspeed"), KEPT[request.param]


def _expected(directory: Path) -> dict[str, Any]:
    return torch.load(directory / "expected.pt", weights_only=True)


def _tensors(checkpoint: Checkpoint) -> dict[tuple[str, str, str], torch.Tensor]:
    return {(each.group, each.fqn, each.kind): each.read() for each in checkpoint.tensors}


@contextmanager
def _engine(directory: Path, case: Case, *, all_parameters: bool = False) -> Iterator[Any]:
    model = build(case)
    config = config_of(case, directory)
    changes = {
        **config,
        "zero_optimization": everything_on_nvme(directory)["zero_optimization"],
        "infinity": {"main_weights": "fp32"} if case.dtype == "bf16" else {},
    }
    for key in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        changes.pop(key)
    groups: Any = model.parameters() if all_parameters else param_groups(case, model)
    engine, *_ = infinity.initialize(
        model=model, model_parameters=groups, config=everything_on_nvme(directory, changes)
    )
    with engine:
        yield engine


@pytest.mark.deep(but=2)
def test_tensors_are_those_that_deepspeed_has(written: tuple[Path, Case], tmp_path: Path) -> None:
    directory, case = written
    expected = _expected(directory)
    convert(directory / "checkpoint", tmp_path / "ours")
    checkpoint = Checkpoint.open(tmp_path / "ours")
    checkpoint.verify()
    found = _tensors(checkpoint)
    for fqn, value in expected["weights"].items():
        assert torch.equal(found["parameters", fqn, "weight"], value.reshape(found["parameters", fqn, "weight"].shape))
    for fqn, value in expected["buffers"].items():
        assert torch.equal(found["buffers", fqn, "weight"], value)
    assert checkpoint.omitted.tied == ({"head.weight": "embed.weight"} if case.tied else {})
    trained = [fqn for fqn, each in build(case).named_parameters() if each.requires_grad]
    wanted = {("parameters", fqn, kind) for fqn in trained for kind in ("exp_avg", "exp_avg_sq")}
    assert {key for key in found if key[2] != "weight"} == wanted
    for fqn, states in expected["states"].items():
        for kind, value in states.items():
            assert torch.equal(found["parameters", fqn, kind], value)


@pytest.mark.deep(but=1)
def test_the_universal_form_gives_the_same(written: tuple[Path, Case], tmp_path: Path) -> None:
    directory, case = written
    if not case.universal:
        pytest.skip("this one was not converted by DeepSpeed's ds_to_universal")
    tag = (directory / "checkpoint" / "latest").read_text()
    one = convert(directory / "checkpoint", tmp_path / "one")
    other = convert(directory / "checkpoint", tmp_path / "other", tag=f"{tag}_universal")
    first, second = Checkpoint(one.folder), Checkpoint(other.folder)
    tensors, others = _tensors(first), _tensors(second)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)
    assert first.training_state() == second.training_state()


@pytest.mark.deep(but=1)
def test_training_goes_on_as_deepspeed_goes_on(written: tuple[Path, Case], tmp_path: Path) -> None:
    directory, case = written
    expected = _expected(directory)
    assert main(["import-deepspeed", str(directory / "checkpoint"), str(tmp_path / "ours")]) == 0
    with _engine(tmp_path, case) as engine:
        path, client_state = engine.load_checkpoint(tmp_path / "ours")
        assert path is not None
        assert client_state == {"epoch": 3, "note": ("a", 1.5)}
        assert engine.global_steps == expected["counters"]["global_steps"] == NUM_STEPS_BEFORE
        assert engine.micro_steps == expected["counters"]["micro_steps"]
        assert engine.skipped_steps == expected["counters"]["skipped_steps"]
        assert engine.global_samples == expected["counters"]["global_samples"]
        assert engine.get_lr() == expected["lrs"]
        if expected["scale"] is not None:
            assert engine.loss_scale() == expected["scale"]
        steps = range(NUM_STEPS_BEFORE, NUM_STEPS_BEFORE + NUM_STEPS_AFTER)
        losses = list(train(engine, case, steps))
        final = {
            fqn: infinity.safe_get_full_fp32_param(each)
            for fqn, each in engine.module.named_parameters()
            if each.requires_grad
        }
    # fp32: the order of sums alone (norms, flat tensors). 16 bits: gradients are rounded, and added up over ranks and
    # micro-batches in another order; where one is next to 0, Adam makes up to a step of the learning rate (1e-2) of it. In
    # fp16, an engine that made the first steps here as well differs from DeepSpeed by more (3e-3 on average).
    tolerance, mean = {"fp32": (1e-6, 1e-7), "bf16": (1e-2, 3e-4), "fp16": (1e-2, 2e-3)}[case.dtype]
    assert losses == pytest.approx(expected["after"], rel=tolerance)
    for fqn, value in expected["final"].items():
        torch.testing.assert_close(final[fqn], value, rtol=0, atol=tolerance)
        assert (final[fqn] - value).abs().mean() < mean


def test_groups_go_by_name(tmp_path: Path) -> None:
    """Frozen parameters may be in the groups here, which DeepSpeed leaves out; what belongs to none is refused."""
    directory = _unpacked("stage1-bf16", tmp_path / "deepspeed")
    case = KEPT["stage1-bf16"]
    convert(directory / "checkpoint", tmp_path / "ours")
    with _engine(tmp_path, case, all_parameters=True) as engine:
        engine.load_checkpoint(tmp_path / "ours")
        found = _tensors(Checkpoint.open(tmp_path / "ours"))
        for fqn, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                state = infinity.safe_get_full_optimizer_state(parameter, "exp_avg")
                assert torch.equal(state, found["parameters", fqn, "exp_avg"])
    with (
        _engine(tmp_path, dataclasses.replace(case, groups=2)) as engine,
        pytest.raises(ValueError, match=r"has 1 groups, and this one 2\. Pass model_parameters"),
    ):
        engine.load_checkpoint(tmp_path / "ours")


# ------------------------------------------------------------------------------------------------------------ bad input


def _rewritten(path: Path, change: Callable[[Any], None]) -> None:
    """``path`` as it would be after ``change``."""
    found = read(path)
    change(found)
    other = path.with_suffix(".new")  # what was read are views of the file
    torch.save(_plain(found), other)
    other.replace(path)


def _plain(value: Any) -> Any:
    """Without records, which cannot be pickled under the names they stand for: what they were made of."""
    if isinstance(value, Record):
        return value.arguments[0] if value.arguments else None
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(each) for each in value)
    return value


def _set(*keys: Any, to: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = to

    return change


_STATES = "optimizer_state_dict"
_STATE = (_STATES, _STATES, "state", 0)
_OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
_MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda each: each.file_size * ("/data/" in each.filename))
        offset = largest.header_offset + 30 + len(largest.filename) + len(largest.extra)
    data = bytearray(path.read_bytes())
    data[offset + 70] ^= 1
    path.write_bytes(bytes(data))


def _changed(name: str, *keys: Any, to: Any, on_both: bool = False) -> Callable[[Path], None]:
    """In the file of rank 1, or of both, another value."""

    def change(folder: Path) -> None:
        for rank in (0, 1) if on_both else (1,):
            _rewritten(folder / name.replace("rank_1", f"rank_{rank}"), _set(*keys, to=to))

    return change


def _with_buffer(name: Any) -> Callable[[Path], None]:
    def add(found: Any) -> None:
        found["module"][name] = torch.ones(1)
        found["buffer_names"] = [*found["buffer_names"], name]

    return lambda folder: _rewritten(folder / _MODEL.replace("rank_1", "rank_0"), add)


_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no rank 0": (lambda f: (f / _OPTIMIZER.replace("rank_1", "rank_0")).unlink(), r"files of ranks \[0\] are missing"),
    "no last rank": (lambda f: (f / _OPTIMIZER).unlink(), "saved by 2 ranks, and has optimizer states of 1"),
    "no model of last rank": (lambda f: (f / _MODEL).unlink(), "2 ranks, and has .* model states of 1"),
    "truncated": (lambda f: _cut(f / _OPTIMIZER), f"{_OPTIMIZER}': it is damaged"),
    "empty": (lambda f: (f / _MODEL).write_bytes(b""), f"{_MODEL}': it is damaged"),
    "flipped bit": (lambda f: _flip(f / _OPTIMIZER), f"{_OPTIMIZER}': it is damaged: Bad CRC-32"),
    "no tensors": (lambda f: torch.save([1], f / _OPTIMIZER), "it has no optimizer state"),
    "unknown stage": (
        _changed(_OPTIMIZER, _STATES, "zero_stage", to=7, on_both=True),
        "its ZeRO stage is 7. Give a check",
    ),
    "other stage": (_changed(_OPTIMIZER, _STATES, "zero_stage", to=2), "its ZeRO stage is not that of"),
    "other steps": (_changed(_MODEL, "global_steps", to=9), f"{_MODEL}': its 'global_steps' is not that of"),
    "other size": (_changed(_OPTIMIZER, _STATES, "fp32_flat_groups", 0, to=torch.zeros(3)), "would end at element"),
    "8 bits": (
        _changed(_OPTIMIZER, *_STATE, "absmax1", to=torch.zeros(3)),
        "keeps 'absmax1', which is not one number per element .*Load the weights alone",
    ),
    "on nvme": (
        _changed(_OPTIMIZER, _STATES, "fp32_flat_groups", 0, to=torch.zeros(0), on_both=True),
        "the optimizer was offloaded to NVMe. Load it with DeepSpeed",
    ),
    "tensor parallel": (
        lambda f: shutil.copy(f / _MODEL, f / _MODEL.replace("mp_rank_00", "mp_rank_01")),
        "mp_rank_01_model_states.pt': .* divided by tensor or pipeline parallelism",
    ),
    "pipeline": (lambda f: (f / "layer_00-model_states.pt").write_bytes(b""), "divided by pipeline parallelism"),
    "experts": (
        lambda f: (f / "layer_0_expert_1_mp_rank_00_model_states.pt").write_bytes(b""),
        r"a mixture of experts over several ranks \(MoE\)",
    ),
    "1-bit": (
        _changed(_MODEL, "ds_config", "optimizer", "type", to="OneBitAdam", on_both=True),
        "its optimizer, OneBitAdam, compresses gradients",
    ),
    "no text as a name": (_with_buffer(b"scale"), "a tensor is named b'scale'"),
    "a parent as a name": (_with_buffer(".."), r"a tensor is named '\.\.'"),
    "no ZeRO": (_changed(_MODEL, "param_shapes", to=None, on_both=True), "it was saved without ZeRO"),
}


@pytest.mark.deep(but=3)
@pytest.mark.parametrize("name", _FAULTS)
def test_bad_input_is_named(name: str, tmp_path: Path) -> None:
    folder = _unpacked("stage3", tmp_path) / "checkpoint" / f"global_step{NUM_STEPS_BEFORE}"
    damage, message = _FAULTS[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        convert(folder.parent, tmp_path / "ours")
    assert not list((tmp_path / "ours").glob("*"))


def test_a_state_that_is_none_is_left_out(tmp_path: Path) -> None:
    """As SGD's momentum without momentum."""
    source = _unpacked("stage3", tmp_path) / "checkpoint"
    file = source / f"global_step{NUM_STEPS_BEFORE}" / _OPTIMIZER
    _rewritten(file, _set(*_STATE, "momentum_buffer", to=None))
    convert(source, tmp_path / "ours")
    assert not any(kind == "momentum_buffer" for *_, kind in _tensors(Checkpoint.open(tmp_path / "ours")))


def test_without_a_target_it_stands_beside_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _unpacked("stage3", tmp_path) / "checkpoint"
    monkeypatch.chdir(source.parent)
    assert main(["import-deepspeed", "checkpoint"]) == 0
    assert "checkpoint-infinity" in capsys.readouterr().out
    assert Checkpoint.open(source.parent / "checkpoint-infinity")


def test_directories_that_hold_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such directory"):
        convert(tmp_path / "nowhere", tmp_path / "ours")
    source = _unpacked("stage1", tmp_path) / "checkpoint"
    with pytest.raises(CheckpointError, match="there is no checkpoint 'other' in it"):
        convert(source, tmp_path / "ours", tag="other")
    with pytest.raises(CheckpointError, match=r"'\.\./ours'"):
        convert(source, tmp_path / "ours", tag="../ours")
    done = convert(source / "global_step3", tmp_path / "ours")  # a tag's own
    with pytest.raises(CheckpointError, match="it exists already, and is not replaced"):
        convert(source, tmp_path / "ours")
    assert done.folder == tmp_path / "ours" / "global_step3"
    (source / "latest").unlink()
    with pytest.raises(
        CheckpointError, match=r"no file 'latest'. Give a checkpoint by its tag \(--tag\), one of \['glob"
    ):
        convert(source, tmp_path / "others")
    for tag in (b"gone", b"\xff\xfe", b"x" * 5000):
        (source / "latest").write_bytes(tag)
        with pytest.raises(CheckpointError, match=f"names '{tag.decode(errors='replace')}', which is not there"):
            convert(source, tmp_path / "others")
    with pytest.raises(CheckpointError, match="none of 'zero_pp_rank_N"):
        convert(tmp_path / "ours", tmp_path / "others")
