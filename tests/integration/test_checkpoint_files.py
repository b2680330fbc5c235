"""What lies in a checkpoint's directory: nothing that is damaged or hostile gets in, and a save leaves whole ones only."""

from __future__ import annotations

import enum
import errno
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from infinity.errors import CheckpointError, StorageError
from tests.exactness.lockstep import BF16, engine_on_nvme
from tests.forked import require_in_child
from tests.internals import BlockFile, Checkpoint, arrays, main, tags, writing
from tests.internals import manifest as manifests
from tests.internals import saved as saved_files


class Model(nn.Module):
    """With a scalar, an empty parameter, one in another order of dimensions, a frozen one and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 300)
        self.turned = nn.Parameter(torch.randn(300, 40).t().contiguous().t() * 0.1)
        self.frozen = nn.Linear(40, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.arange(12).reshape(3, 4) % 2 == 0)
        self.register_buffer("short", torch.randn(5).bfloat16())
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.to(self.first.weight.dtype)) @ self.turned
        return (self.frozen(hidden) * self.scale).float().square().mean()


def _engine(drive: Path, **changes: Any) -> Any:
    drive.mkdir(exist_ok=True)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return engine_on_nvme(drive, Model(), {**BF16, "optimizer": optimizer, **changes})


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(4, 8)))
    engine.step()


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 1 << 10)  # many chunks
    with _engine(tmp_path / "drive") as engine:
        _step(engine)
        engine.save_checkpoint(tmp_path / "saved", tag="one", client_state={"rng": torch.randn(20_000), "epoch": 3})
    return tmp_path / "saved" / "one"


_NOBODY = 65534


@pytest.mark.deep
def test_the_code_in_the_format_s_page_runs(saved: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "checkpoint-format.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["print_largest"](saved.parent) == Checkpoint.open(saved).verify()


def test_a_flipped_bit_anywhere_is_found(saved: Path) -> None:
    generator = random.Random(0)
    files = [path for path in saved.rglob("*") if path.is_file()]
    for path in files:
        data = path.read_bytes()
        for bit in {0, len(data) * 8 - 1, *(generator.randrange(len(data) * 8) for _ in range(6))}:
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                Checkpoint.open(saved).verify()
        path.write_bytes(data)
    Checkpoint.open(saved).verify()


@pytest.mark.deep
def test_a_damaged_checkpoint_is_refused_and_training_does_not_go_on_with_a_part_of_it(saved: Path) -> None:
    path = max((path for path in saved.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    with _engine(saved.parents[1] / "drive") as engine:
        for damaged in (whole[:-1], whole[:-4096], b"", whole[:5000] + b"x" + whole[5001:]):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.parent.name):
                engine.load_checkpoint(saved.parent, tag="one")
        elsewhere = saved.parents[1] / "elsewhere"
        uses: list[Callable[[], Any]] = [
            lambda: _step(engine),
            lambda: engine.module.eval()(torch.ones(4, 8)),
            lambda: engine.save_checkpoint(elsewhere),
            lambda: engine.save_16bit_model(elsewhere),
            lambda: engine.save_fp32_model(elsewhere),
        ]
        for use in uses:
            with pytest.raises(CheckpointError, match="failed midway"):
                use()
        assert not elsewhere.exists()
        path.write_bytes(whole)
        engine.load_checkpoint(saved.parent, tag="one")
        _step(engine)
        path.unlink()
        with pytest.raises(CheckpointError, match="missing"):
            engine.load_checkpoint(saved.parent)


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        contents = json.loads((folder / "manifest.json").read_text())
        del contents["crc32c"]
        change(contents)
        (folder / "manifest.json").write_bytes(manifests._sealed(contents))

    return apply


def _array(**facts: Any) -> Callable[[Path], None]:
    """The first array's are others."""
    return _changed(lambda contents: contents["arrays"][0].update(facts))


def _file(name: str, facts: Any) -> Callable[[Path], None]:
    return _changed(lambda contents: contents["files"].update({name: facts}))


def _pipe(folder: Path) -> None:
    """An entry of no bytes for what is no file."""
    os.mkfifo(folder / "c")
    _file("c", [0, 0])(folder)


def _text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_text(text)


def _flip_version(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"version":3', '"version":7'))


_HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "newer": (_changed(lambda c: c.update(version=4, made_by="infinity 9.8")), "version 4, made by infinity 9.8"),
    "older": (_changed(lambda c: c.update(version=1)), "of format version 1.*export"),
    "a flipped bit of the version": (_flip_version, "it is damaged, or of format version 7"),
    "a name outside": (_file("../../secret", [1, 1]), "outside of the checkpoint"),
    "a parent as a name": (_array(fqn=".."), "named"),
    "a negative size": (_array(shape=[-1, 8]), "has the shape"),
    "no dtype": (_array(dtype="load"), "dtype 'load'"),
    "twice": (_changed(lambda c: c["arrays"].append(c["arrays"][0])), "twice"),
    "more chunks than memory for their index": (_array(shape=[1 << 50], chunk=[1]), "which none has"),
    "a pipe": (_pipe, "is not a file"),
    "deep JSON": (_text("[" * 1_000_000), "does not hold the JSON"),
    "none": (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json in it"),
}


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("case", _HOSTILE)
def test_hostile_manifests_are_refused(case: str, saved: Path) -> None:
    change, message = _HOSTILE[case]
    change(saved)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(saved.parent, "one")


@pytest.mark.deep
def test_what_is_larger_than_memory_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seal(contents: dict[str, Any]) -> None:
        contents["files"]["training.json"] = [1 << 40, 0]

    os.truncate(saved / "training.json", 1 << 40)  # sparse
    _changed(seal)(saved)
    monkeypatch.setattr(manifests, "free_bytes", lambda: 1 << 30)
    with pytest.raises(CheckpointError, match=r"training\.json': it has .*1.1 TB.*, and .*1.1 GB.* of memory are free"):
        Checkpoint.open(saved.parent, "one").training_state()


@pytest.mark.deep
def test_what_a_drive_does_not_give_is_told_with_the_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with _engine(saved.parents[1] / "drive") as engine:
        with monkeypatch.context() as patched:
            patched.setattr(BlockFile, "read", fail)
            with pytest.raises(CheckpointError, match=r"tensors\.zarr.*cannot be read: Input/output error"):
                engine.load_checkpoint(saved.parent)
        for name in ("is_file", "is_dir"):
            with monkeypatch.context() as patched:
                patched.setattr(Path, name, fail)
                with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
                    engine.load_checkpoint(saved.parent, tag="one" if name == "is_dir" else None)
                with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
                    Checkpoint.open(saved.parent)
        engine.load_checkpoint(saved.parent)


class _Foreign:
    pass


@pytest.mark.deep
def test_what_is_no_plain_data_is_refused_by_its_place_before_anything_is_replaced(saved: Path) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    itself: list[Any] = []
    itself.append(itself)
    refused: list[tuple[Any, type[Exception], str]] = [
        (
            {"it": [1, _Foreign()]},
            CheckpointError,
            r"\['client_state'\]\['it'\]\[1\] is a \S+\._Foreign.*state_dict\(\)",
        ),
        ({"it": itself}, CheckpointError, "its values cannot be written: .* For an object, give its state_dict"),
        ([1], TypeError, "client_state must be a dict, not list"),
    ]
    with _engine(saved.parents[1] / "drive") as engine:
        for state, error, message in refused:
            with pytest.raises(error, match=message):
                engine.save_checkpoint(saved.parent, tag=saved.name, client_state=state)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


class _Number(enum.IntEnum):
    SEVEN = 7


@pytest.mark.deep
def test_plain_data_comes_back_as_it_was_and_not_by_pickle(tmp_path: Path) -> None:
    large = torch.arange(40_000.0).view(200, 200)
    numbers = [1, -2.5, float("inf"), 1 + 2j, True, None, 1 << 70, np.float32(2.5), np.bool_(True), _Number.SEVEN]
    texts = ["a", "ä", b"bytes", bytearray(b"more"), "x" * 100_000, b"y" * 100_000, Path("/a/b")]
    containers = [(1, (2, [3])), {1, 2}, frozenset("ab"), {(1, "a"): 2, None: 3}, {"__is__": "float"}, {}, ()]
    plain: dict[str, Any] = {"numbers": numbers, "texts": texts, "containers": containers}
    plain |= {"ordered": OrderedDict(b=1, a=2), "torch": [torch.float16, torch.device("cpu"), torch.Size([1, 2])]}
    arrays = [np.arange(6.0).reshape(2, 3).T, np.zeros((0, 3)), np.array(["a", "bc"]), np.ones(2, ">i4")]
    tensors = [large, large.t(), large[:, 3], large[:0], torch.ones((), dtype=torch.bfloat16), torch.ones(2) * 1j]
    tensors += [nn.Parameter(torch.ones(2)), torch.ones(3).to(torch.float8_e5m2), torch.tensor([True, False])]
    with _engine(tmp_path / "drive") as engine:
        engine.save_checkpoint(tmp_path / "saved", "one", {**plain, "arrays": arrays, "tensors": tensors})
        _, found = engine.load_checkpoint(tmp_path / "saved")
    assert {name: found[name] for name in plain} == plain and type(found["ordered"]) is OrderedDict
    for name in ("numbers", "containers"):
        assert [type(each) for each in found[name][:4]] == [type(each) for each in plain[name][:4]]
    for one, other in zip(found["arrays"], arrays, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    for one, other in zip(found["tensors"], tensors, strict=True):
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
    files = {path.name for path in (tmp_path / "saved" / "one").iterdir()}
    assert files == {"manifest.json", "training.json", "training.bin", "tensors.zarr"}
    assert not any(path.is_file() and zipfile.is_zipfile(path) for path in (tmp_path / "saved" / "one").rglob("*"))


@pytest.mark.deep
@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(
    tag: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = saved.parents[1] / "backup"
    shutil.copytree(saved.parent, backup)
    write, num_left = BlockFile.write, [7]

    def full(self: BlockFile, *args: Any) -> None:
        num_left[0] -= 1
        if num_left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, *args)

    with _engine(saved.parents[1] / "drive") as engine:
        with monkeypatch.context() as patched:
            patched.setattr(saved_files, "free_bytes", lambda directory: 1000)
            with pytest.raises(StorageError, match=r"has 1000 bytes free, and the checkpoint takes \d+ bytes"):
                engine.save_checkpoint(saved.parent, tag=tag)
        monkeypatch.setattr(BlockFile, "write", full)
        with pytest.raises(StorageError, match="No space left on device"):
            engine.save_checkpoint(saved.parent, tag=tag)
        names = [sorted(p.relative_to(top) for p in top.rglob("*")) for top in (saved.parent, backup)]
        assert names[0] == names[1]
        Checkpoint.open(saved.parent).verify()
        _step(engine)


@pytest.mark.deep
@pytest.mark.root
def test_a_read_only_drive_is_told_and_is_loaded_from(saved: Path, small_tmpfs: Callable[[int], Path]) -> None:
    drive = small_tmpfs(8 << 20)
    shutil.copytree(saved.parent, drive, dirs_exist_ok=True)
    (drive / ".two.saving-0").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(drive)], check=True)
    with _engine(saved.parents[1] / "drive") as engine:
        with pytest.raises(StorageError, match=r"Read-only file system.*Give a directory that can be written to"):
            engine.save_checkpoint(drive)
        engine.load_checkpoint(drive)


def test_a_directory_that_lets_nobody_look_is_in_nobodys_way() -> None:
    """As the lost+found of a file system's root."""
    with tempfile.TemporaryDirectory() as name:  # others may not enter pytest's
        directory = Path(name)
        directory.chmod(0o777)
        (directory / "lost+found").mkdir(mode=0)

        def saves() -> bool:
            if not os.geteuid():
                os.seteuid(_NOBODY)
            for tag in ("one", "two"):
                with writing(directory, tag, [], is_latest=True, keep_last=1) as files:
                    files.write_training_state({"counters": {}, "client_state": {}})
            return tags(directory) == ["two"]

        require_in_child(saves)


@pytest.mark.deep
def test_links_and_files_in_the_way(saved: Path) -> None:
    there = saved.parent
    (there / "file").write_text("mine")
    (there / "nowhere").symlink_to(there / "missing")
    shutil.copytree(saved, there.parent / "elsewhere")
    (there / "link").symlink_to(there.parent / "elsewhere", target_is_directory=True)
    with _engine(saved.parents[1] / "drive") as engine:
        engine.load_checkpoint(there, tag="link")
        for tag in ("", "..", "a/b", "latest", " ends in blanks", "\ud800", "x" * 240):
            with pytest.raises(ValueError, match="tag"):
                engine.save_checkpoint(there, tag=tag)
        for text in ("two", "../saved/one", "x" * 4000):
            (there / "latest").write_text(text)
            with pytest.raises(CheckpointError, match=r"latest|no such checkpoint beside it"):
                engine.load_checkpoint(there)
        (there / "addon").mkdir()
        (there / "addon" / "manifest.json").write_text('{"name": "mine"}')
        taken = {
            "file": "in it is not a directory",
            "nowhere": "in it is not a directory",
            "addon": "that is not a checkpoint",
        }
        for tag, words in taken.items():
            with pytest.raises(StorageError, match=f"'{tag}' {words}"):
                engine.save_checkpoint(there, tag=tag)
        engine.save_checkpoint(there, tag="link")  # takes the link's place, not that of what it names
        assert not (there / "link").is_symlink() and Checkpoint.open(there, "link").verify()
        assert Checkpoint(there.parent / "elsewhere").verify()
        (there.parent / "way").symlink_to(there, target_is_directory=True)
        engine.save_checkpoint(there.parent / "way", tag="two")
        assert Checkpoint.open(there, "two").verify()
        for place, tag in ((there.parent / "no such directory", None), (there, "file")):
            with pytest.raises(CheckpointError, match="there is no "):
                engine.load_checkpoint(place, tag=tag)


@pytest.mark.deep
def test_only_the_owner_can_write_to_what_is_saved_whatever_the_umask(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir(0o700)
    top = tmp_path / "made"
    changes = {"csv_monitor": {"enabled": True, "output_path": str(top / "csv")}}
    changes |= {"infinity": {"run_log": str(top / "logs" / "run"), "timeline": str(tmp_path / "trace.json")}}
    before = os.umask(0)
    try:
        with _engine(drive, **changes) as engine:
            _step(engine)
            engine.save_checkpoint(top / "saved" / "here", client_state={"x": 1})
            engine.save_16bit_model(top / "weights")
        assert main(["report", str(top / "logs" / "run")]) == 0
        assert main(["checkpoint", "export", str(top / "saved" / "here"), str(top / "exported")]) == 0
    finally:
        os.umask(before)
    found = [*top.rglob("*"), top, tmp_path / "trace.json"]
    assert len(found) > 20
    assert [path for path in found if path.stat().st_mode & 0o022] == []
