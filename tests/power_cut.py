"""A machine whose power fails: of what was not flushed, anything may be on its drives, or nothing, or torn pieces of it.

[Note: what is sure] Programs see real files. Beside them is kept what is sure to be on the drives: of a file the bytes that
it had when it was last flushed, of a directory the names. All else may be there or not after a cut, each sector and each
name by itself, in whichever version was written since. That is more than file systems do.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from swapper import Volume
from swapper.backend import Direction, IOBackend, IORequest
from swapper.backends import BackendWrapper
from tests.internals import open_backend

_Key = tuple[int, int]


class _File:
    """A file's bytes, and the descriptor by which it stays, so that its number is not given to another one."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self.sure = b""
        self.writes: list[tuple[int, bytes, list[bool]]] = []
        """Through a backend, since the last flush: where, what, and whether it is over."""
        self.has_backend = False

    def content(self) -> bytes:
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)

    def after_cut(self, chance: random.Random, sector_bytes: int) -> bytes:
        new = self.content()
        length = chance.choice([len(self.sure), len(new), chance.randint(*sorted((len(self.sure), len(new))))])
        found = bytearray(self.sure[:length].ljust(length, b"\0"))
        writes = [(at, data) for at, data, _ in self.writes] if self.has_backend else [(0, new)]
        chance.shuffle(writes)
        share = chance.choice([0.0, 0.5, 0.95, 1.0])
        for at, data in writes:
            for low in range(0, len(data), sector_bytes):
                if chance.random() < share:
                    part = data[low : low + sector_bytes][: max(0, length - at - low)]
                    found[at + low : at + low + len(part)] = part
        return bytes(found)


class Machine:
    """Knows what is on the drives below ``root``, and what is only on its way there.

    Attributes:
        on_event: Called before and after each step of a program towards the drives, with what it is.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.on_event: Callable[[str], None] = lambda event: None
        self._lock = threading.RLock()
        self._files: dict[_Key, _File] = {}
        self._sure: dict[Path, dict[str, _Key]] = {}
        """By directory, its names when it was last flushed."""
        self._seen: dict[Path, dict[str, list[_Key | None]]] = {}
        """By directory, what each name has stood for since then; the last is what it stands for now."""
        self._look()
        for file in self._files.values():
            file.sure = file.content()
        for directory in list(self._seen):
            self._flush_names(directory)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """What is done in the ``with`` block is done on this machine."""

        def opened(volume: Volume, *args: Any) -> IOBackend:
            return _Noted(open_backend(volume, *args), volume, self)

        with contextlib.ExitStack() as patches:
            for name in ("fsync", "fdatasync"):
                patches.enter_context(mock.patch.object(os, name, self._flush))
            for name in ("replace", "rename", "unlink", "mkdir"):
                patches.enter_context(mock.patch.object(os, name, self._renaming(name, getattr(os, name))))
            patches.enter_context(mock.patch("swapper.versioned.open_backend", opened))
            yield

    def after_cut(self, target: Path, chance: random.Random, sector_bytes: int) -> None:
        """Write to ``target``, a new directory, what may be found if the power failed now."""
        with self._lock:
            self._look()
            self._write(self.root, target, chance, sector_bytes)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file.fd)

    # -- what programs do --------------------------------------------------------------------------------------------

    def _flush(self, fd: int) -> None:
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        self._event("flush begins")
        with self._lock:
            file = self._files.get(key)
            written = file.content() if file is not None and not file.has_backend else b""
            over = [write for write in file.writes if write[2]] if file is not None else []
        self._event("flush")
        with self._lock:
            if file is not None and file.has_backend:
                size = max(len(file.sure), os.fstat(file.fd).st_size)
                found = bytearray(file.sure.ljust(size, b"\0"))
                for at, data, _ in over:
                    found[at : at + len(data)] = data
                file.sure = bytes(found)
                file.writes = [write for write in file.writes if not any(write is other for other in over)]
            elif file is not None:
                file.sure = written
            elif stat.S_ISDIR(status.st_mode):
                for directory in self._seen:
                    if directory.stat().st_ino == status.st_ino:
                        self._flush_names(directory)
        self._event("flush has ended")

    def _flush_names(self, directory: Path) -> None:
        now = {name: found[-1] for name, found in self._seen[directory].items()}
        self._sure[directory] = {name: key for name, key in now.items() if key is not None}
        self._seen[directory] = {name: [key] for name, key in now.items()}

    def _renaming(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            is_here = self.root in Path(path).parents
            if is_here:
                self._event(f"{name} begins")
            real(path, *args, **kwargs)
            if is_here:
                self._event(f"{name} has ended")

        return call

    def _event(self, event: str) -> None:
        with self._lock:
            self._look()
        self.on_event(event)

    def note_write(self, path: Path, at: int, data: bytes) -> list[bool]:
        """A write begins; the caller says in what is returned when it is over."""
        status = path.stat()
        is_over = [False]
        with self._lock:
            self._look()
            file = self._files[status.st_dev, status.st_ino]
            if not file.has_backend:
                file.has_backend = True
            file.writes.append((at, data, is_over))
        self.on_event("write begins")
        return is_over

    # -- what is there -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take note of new names and files; some are made without a call that could be seen."""
        waiting = [self.root]
        while waiting:
            directory = waiting.pop()
            seen = self._seen.setdefault(directory, {})
            self._sure.setdefault(directory, {})
            there: dict[str, _Key] = {}
            for entry in os.scandir(directory):
                status = entry.stat()
                key = there[entry.name] = status.st_dev, status.st_ino
                if entry.is_dir():
                    waiting.append(Path(entry.path))
                elif key not in self._files:
                    self._files[key] = _File(Path(entry.path))
            for name in {*seen, *there}:
                key_now = there.get(name)
                found = seen.setdefault(name, [None])
                if found[-1] != key_now:
                    found.append(key_now)

    def _write(self, directory: Path, target: Path, chance: random.Random, sector_bytes: int) -> None:
        target.mkdir()
        new = chance.choice([0.0, 0.5, 1.0])
        sure = self._sure[directory]
        for name, versions in sorted(self._seen[directory].items()):
            key = chance.choice(versions) if chance.random() < new else sure.get(name)
            if (directory / name).is_dir():
                if key is not None:
                    self._write(directory / name, target / name, chance, sector_bytes)
            elif key is not None:
                (target / name).write_bytes(self._files[key].after_cut(chance, sector_bytes))


class _Noted(BackendWrapper):
    """Tells a machine of all writes."""

    def __init__(self, inner: IOBackend, volume: Volume, machine: Machine) -> None:
        super().__init__(inner)
        self._volume = volume
        self._machine = machine

    def submit(self, request: IORequest) -> None:
        if request.direction is Direction.READ:
            self.inner.submit(request)
            return
        file, at = self._volume.locate(request.offset)
        path = next(path for path in file.directory.glob("states*") if path.stat().st_ino == os.fstat(file.fd).st_ino)
        is_over = self._machine.note_write(path, at, bytes(request.memory))

        def complete(_: IORequest, transferred_bytes: int, error: OSError | None) -> None:
            is_over[0] = True
            request.complete(transferred_bytes, error)

        self.inner.submit(IORequest(request.direction, request.offset, request.memory, request.address, complete))


def copied(source: Path, target: Path) -> Path:
    """A directory of the same files."""
    shutil.copytree(source, target)
    return target
