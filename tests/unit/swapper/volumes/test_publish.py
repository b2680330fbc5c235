"""What `swapper.volumes.publish` does with whole directories."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from swapper.volumes import publish


def _tree(folder: Path) -> Path:
    for name in ("a/b/c", "a/d", "e"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    return folder


def test_every_file_and_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced.append((found.st_dev, found.st_ino))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    folder = _tree(tmp_path / "tree")
    publish.sync_tree(folder)
    wanted = [folder, *folder.rglob("*")]
    assert sorted(synced) == sorted((path.stat().st_dev, path.stat().st_ino) for path in wanted)


def test_an_error_of_one_sync_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _tree(tmp_path / "tree")
    bad = (folder / "a/d/file").stat().st_ino

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(5, "the drive has lost it")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="lost it"):
        publish.sync_tree(folder)


def test_a_tree_is_removed_and_what_its_links_name_is_not(tmp_path: Path) -> None:
    kept, folder = _tree(tmp_path / "kept"), _tree(tmp_path / "tree")
    (folder / "a/link").symlink_to(kept, target_is_directory=True)
    (folder / "e/link").symlink_to(kept / "e/file")
    publish.remove_tree(folder)
    assert not folder.exists()
    assert sum(path.is_file() for path in kept.rglob("*")) == 3
    publish.remove_tree(folder)  # is gone already


def test_what_fails_leaves_no_directory_that_was_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "new" / "below", tmp_path / "there"):
        with pytest.raises(ValueError), publish.Staging(target, "name") as staging:
            (staging.path / "file").write_text("half")
            raise ValueError
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and not any((tmp_path / "there").iterdir())
    with pytest.raises(ValueError), publish.Staging(tmp_path / "new", "name"):
        (tmp_path / "new" / "of somebody else").touch()
        raise ValueError
    assert (tmp_path / "new" / "of somebody else").exists()


def test_a_child_that_was_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    with publish.locked(tmp_path):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.read(reading, 1)
            os._exit(0)
    try:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the child has it
        os.close(descriptor)
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
