"""Directories for scratch files are checked when the config is read, and nothing is written into them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from infinity.config import load_config
from infinity.config.schema.directories import check_directories, make_directories, remove_empty
from infinity.errors import ConfigError, StorageError
from swapper.volumes.directory import Directory

KEY = "zero_optimization.offload_param.nvme_path"


def nvme(path: object, **block: Any) -> dict[str, Any]:
    offload = {"device": "nvme", **({} if path is None else {"nvme_path": path}), **block}
    return {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": offload}}


def test_several_directories(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    assert load_config(nvme(list(map(str, paths)))).offload_param.nvme_paths == tuple(paths)
    assert load_config(nvme(paths)).offload_param.nvme_paths == tuple(paths)


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = load_config(nvme(".")).offload_param
    monkeypatch.chdir("/")
    assert section.nvme_paths == (tmp_path,)


def test_home_and_variables_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    for name in ("~", "$SCRATCH", "${SCRATCH}/."):
        assert load_config(nvme(name)).offload_param.nvme_paths == (tmp_path,)
    monkeypatch.delenv("SCRATCH")
    for name in ("$SCRATCH/x", "${SCRATCH}"):
        with pytest.raises(ConfigError, match=r"SCRATCH.*is not set. Set the environment variable SCRATCH"):
            load_config(nvme(name))


@pytest.mark.parametrize("path", [None, "auto", []])
def test_no_directory_given(path: object) -> None:
    with pytest.raises(ConfigError, match=f"'{KEY}'.*no directory is given. Name a directory"):
        load_config(nvme(path))


@pytest.mark.parametrize("path", ["", 3, {"a": 1}, [1]])
def test_not_a_path(path: object) -> None:
    with pytest.raises(ConfigError, match=f"'{KEY}"):
        load_config(nvme(path))


def test_missing_directory(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    config = load_config(nvme([str(tmp_path), str(missing)]))
    assert not missing.exists()  # nothing is written while a config is read
    assert make_directories(config.nvme_paths) == [missing]
    assert missing.is_dir()
    assert make_directories(config.nvme_paths) == []
    remove_empty([missing])
    assert not missing.exists()
    assert load_config(nvme(str(missing)), check_storage=False).offload_param.nvme_paths == (missing,)


@pytest.mark.parametrize("key", [KEY, "infinity.durable_path"])
def test_a_directory_whose_parent_is_missing_is_not_made(key: str, tmp_path: Path) -> None:
    wrong = tmp_path / "nvmee" / "run" / "states"
    config = nvme(str(wrong if key == KEY else tmp_path))
    if key != KEY:
        offload = {"device": "nvme", "nvme_path": str(tmp_path)}
        config["zero_optimization"] = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
        config["infinity"] = {"durable": True, "durable_path": str(wrong)}
    words = rf"states'.*{key}.*does not exist, nor does its parent; the nearest directory that exists is '{tmp_path}'.*mkdir -p"
    with pytest.raises(StorageError, match=words):
        load_config(config)
    read = load_config(config, check_storage=False)
    with pytest.raises(StorageError, match="nor does its parent"):
        make_directories([wrong] if key != KEY else read.nvme_paths)
    assert list(tmp_path.iterdir()) == []


def test_not_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StorageError, match="is not a directory"):
        load_config(nvme(str(file)))
    with pytest.raises(StorageError, match="is not a directory"):
        load_config(nvme(str(file / "below")))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="does not exist"):
        load_config(nvme(str(tmp_path / "link")))
    with pytest.raises(StorageError, match="File name too long"):
        make_directories([tmp_path / ("x" * 300)])


def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may write everywhere, so the answer of the system is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(StorageError, match=r"is not writable. Change its permissions"):
        check_directories([tmp_path], key=KEY)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_path_is_left_alone_without_nvme(device: str) -> None:
    """Files keep a path around while the device is another."""
    section = load_config(nvme("/no/such/directory", device=device)).offload_param
    assert (section.device, section.nvme_paths) == (device, ())


# ---------------------------------------------------------------------------------------------------------- capacities


def _two(tmp_path: Path) -> tuple[Path, Path]:
    paths = (tmp_path / "a", tmp_path / "b")
    for path in paths:
        path.mkdir()
    return paths


def test_capacities(tmp_path: Path) -> None:
    a, b = _two(tmp_path)
    items = [{"path": str(a), "capacity": "400GB"}, str(b), {"path": "$HERE", "capacity": "auto"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HERE", str(tmp_path))
        section = load_config(nvme(items)).offload_param
    assert section.nvme_directories == (Directory(a, 400 * 10**9), Directory(b), Directory(tmp_path))
    assert section.nvme_paths == (a, b, tmp_path)
    assert hash(section) == hash(section)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"path": ".", "capacty": "1GB"}, r"a directory has no 'capacty': did you mean 'capacity'\?"),
        ({"capacity": "1GB"}, 'a directory without "path"; write'),
        ({"path": "", "capacity": "1GB"}, "must be a text"),
        ("\udc00", "a character that paths cannot have"),
        ({"path": ".", "capacity": "much"}, "capacity 'much' of '.' must be a size"),
        ({"path": ".", "capacity": 0}, "more than 0 bytes"),
        ({"path": ".", "capacity": 4095}, "capacity 4095 of '.' must be at least 4096 bytes"),
        ([["."]], "must be a text, an object"),
    ],
    ids=str,
)
def test_directories_that_are_none(item: object, words: str) -> None:
    for value in (item, [".", item]):
        with pytest.raises(ConfigError, match=words) as caught:
            load_config(nvme(value))
        assert caught.value.key == KEY


def test_a_directory_given_twice(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for second in (tmp_path, tmp_path / ".", tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"given twice\. Name each drive once"):
            load_config(nvme([str(tmp_path), {"path": str(second), "capacity": "1GB"}]))


def _both(param: object, optimizer: object) -> dict[str, Any]:
    blocks = {
        name: {"device": "nvme", "nvme_path": path}
        for name, path in (("offload_param", param), ("offload_optimizer", optimizer))
    }
    return {"train_batch_size": 1, "zero_optimization": blocks}


def test_blocks_that_share_a_directory_agree_on_its_capacity(tmp_path: Path) -> None:
    a, b = map(str, _two(tmp_path))
    limited = {"path": a, "capacity": "1GB"}
    for param, optimizer in (([limited], [limited]), ([a], [a, b]), ([limited], [b]), ([limited, b], [limited, b])):
        load_config(_both(param, optimizer))
    key = "zero_optimization.offload_optimizer.nvme_path"
    for param, optimizer in (
        ([limited], [a]),
        ([a], [limited]),
        ([limited], [{"path": a, "capacity": "2GB"}]),
        ([limited], [limited, b]),
    ):
        with pytest.raises(ConfigError, match="give both blocks the same list of directories") as caught:
            load_config(_both(param, optimizer))
        assert caught.value.key == key
