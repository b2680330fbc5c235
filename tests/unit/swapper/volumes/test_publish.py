"""What `swapper.volumes.publish` does with whole directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
from pathlib import Path

import pytest

from swapper.volumes import publish
from tests.killed import left_by_a_killed_save


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


def test_what_cannot_be_removed_at_once_is_removed_by_the_next_save(tmp_path: Path) -> None:
    """Removing takes file descriptors, of which there may be none: the mark stays until all else is gone."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for num_spare in range(8):
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + num_spare, before[1]))
            with contextlib.suppress(OSError), publish.Staging(tmp_path, "name") as staging:
                _tree(staging.path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with publish.Staging(tmp_path, "name"):
        pass
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "directory", "loop"])
def test_only_files_are_replaced(kind: str, tmp_path: Path) -> None:
    """As root, a rename would replace /dev/null."""
    place = path = tmp_path / "place"
    if kind == "loop":
        place.symlink_to(place)
    elif kind == "directory":
        place.mkdir()
    else:
        os.mkfifo(place)
    if kind == "link to a pipe":
        path = tmp_path / "link"
        path.symlink_to(place)
    before = place.lstat()
    with pytest.raises(OSError, match=str(place)), publish.replacing(path):
        pass
    assert place.lstat().st_ino == before.st_ino and set(tmp_path.iterdir()) == {place, path}


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "page.html"
    with pytest.raises(FileNotFoundError) as caught, publish.replacing(path):
        pass
    assert caught.value.filename == str(path)


def _as_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of directories stay within a machine, as those of NFS, FUSE and Lustre: a second one gets them as well."""
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_another_machine_leaves_alone_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_on_another_machine(monkeypatch)
    with publish.Staging(tmp_path, "mine") as staging:
        (staging.path / "file").write_text("half")
        publish.remove_abandoned(tmp_path)
        with publish.Staging(tmp_path, "other"):
            assert (staging.path / "file").read_text() == "half"
    assert not any(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    _tree(left_by_a_killed_save(tmp_path / ".name.saving-0123456789abcdef"))
    publish.remove_abandoned(tmp_path)
    assert not any(tmp_path.iterdir())


_NAMES = (".money.saving-plan", ".tag.saving-0123456789abcdef")


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("lock", ["none", "empty", "other", "longer", "directory", "pipe", "link"])
def test_a_directory_without_our_mark_stays(name: str, lock: str, tmp_path: Path) -> None:
    theirs = _tree(tmp_path / "there" / name)
    ours = left_by_a_killed_save(tmp_path / "ours") / ".lock"
    place = theirs / ".lock"
    if lock == "directory":
        place.mkdir()
    elif lock == "pipe":
        os.mkfifo(place)
    elif lock == "link":
        place.symlink_to(ours)
    elif lock != "none":
        place.write_bytes({"empty": b"", "other": b"1234\n", "longer": ours.read_bytes() + b"\n"}[lock])
    before = sorted(tmp_path.rglob("*"))
    publish.remove_abandoned(tmp_path / "there")
    with publish.Staging(tmp_path / "there", "tag"):
        assert publish.abandoned(tmp_path / "there") == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_to_a_directory_with_our_mark_stays(tmp_path: Path) -> None:
    _tree(left_by_a_killed_save(tmp_path / "ours"))
    (tmp_path / ".tag.saving-0").symlink_to(tmp_path / "ours", target_is_directory=True)
    publish.remove_abandoned(tmp_path)
    assert (tmp_path / ".tag.saving-0").is_symlink() and (tmp_path / "ours" / "e" / "file").exists()


def test_without_locks_nothing_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with publish.Staging(tmp_path, "name") as staging:
        publish.remove_abandoned(tmp_path)
        assert staging.path.exists()
    assert not any(tmp_path.iterdir())


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("num", [1, 2])
def test_without_exchange_the_old_or_the_new_one_has_the_name(
    num: int, is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_renameat2", None)
    real, calls = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == num:
            raise _Killed if is_killed else OSError(5, "the server is gone")
        return real(path, target)

    _tree(tmp_path / "tag.saving-x")
    staging = publish.Staging(tmp_path, "tag.saving-x").__enter__()
    (staging.path / "checkpoint").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        if is_killed:
            patched.setattr(publish, "put_back", lambda aside, target: None)
        with pytest.raises(_Killed if is_killed else OSError):
            publish.exchange(staging.path / "checkpoint", tmp_path / "tag.saving-x")
    if is_killed:
        os.close(staging._lock)
        publish.remove_abandoned(tmp_path)
    else:
        staging.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["tag.saving-x"]
    assert (tmp_path / "tag.saving-x" / "e" / "file").read_text() == "e"


def test_what_cannot_be_put_back_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = left_by_a_killed_save(tmp_path / ".tag.saving-0")
    _tree(left / "replaced")

    def replace(path: Path, target: Path) -> Path:
        raise OSError(5, "the server is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        publish.remove_abandoned(tmp_path)
        with pytest.raises(OSError, match="server"), publish.Staging(tmp_path, "tag"):
            pass
    assert (left / "replaced" / "e" / "file").exists()
    publish.remove_abandoned(tmp_path)
    assert (tmp_path / "tag" / "e" / "file").exists() and not left.exists()


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
