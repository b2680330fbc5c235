"""A swapper whose bytes outlive its process, and which goes back to what they were at a commit."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swapper.backend import IOBackend
from swapper.config import SwapperConfig, round_up
from swapper.errors import DurableRunError, VolumeError, error_words
from swapper.measure.choice import open_backend
from swapper.meters.busy import BusyTimes
from swapper.swapper import Swapper
from swapper.sync.limits import limits_in_words, start_threads
from swapper.uncopyable import closed_unless_made
from swapper.volumes.directory import DirectoryLike, as_directories
from swapper.volumes.run_directory import RunDirectory
from swapper.volumes.volume import Volume
from swapper.wrappers.integrity import IntegrityBackend
from swapper.wrappers.versions import Runs, VersionedBackend

logger = logging.getLogger(__name__)
_STRIPE_BYTES = 1 << 20
"""The same in each process that uses a run, whatever its requests are."""
_NAME = "states"
_LOOK_UP_SECONDS = 0.2  # an interrupt gets through


class Versions:
    """Knows the commits of a run directory and where the bytes of each of them lie; must not know what they mean.

    Every byte that is read is compared with its checksum. After a commit could not be made, no later one can.

    Attributes:
        swapper: Reads and writes the present. Extents are allocated anew in each process, in the same order.

    Args:
        run: Where commits are written.
        backend: Moves the bytes. Its space is larger than ``capacity_bytes``, see :class:`VersionedBackend`.
        sync: Whatever the backend has written is on the drives when this returns; raises OSError if it cannot be.
        capacity_bytes: What extents may take together.
        config: How to use it.
        busy: See :class:`Swapper`.
    """

    def __init__(
        self,
        run: RunDirectory,
        backend: IOBackend,
        sync: Callable[[], None],
        capacity_bytes: int,
        config: SwapperConfig,
        *,
        busy: BusyTimes | None = None,
    ) -> None:
        self._run = run
        self._sync = sync
        self._slots = VersionedBackend(backend, round_up(capacity_bytes))
        self._checked = IntegrityBackend(self._slots, boundary_bytes=config.request_bytes)
        self.swapper = Swapper(self._checked, config, busy=busy, is_prewritten=True)
        self._kept: dict[int, Runs] = {}
        self._thread: threading.Thread | None = None
        """Makes the commit that was begun last: from then until somebody has seen that it is over."""
        self._failure: BaseException | None = None
        """Of the first commit that could not be made, for good."""

    @classmethod
    def open(
        cls,
        run: RunDirectory,
        directories: Sequence[DirectoryLike],
        capacity_bytes: int,
        volume_bytes: int,
        config: SwapperConfig,
        *,
        busy: BusyTimes | None = None,
    ) -> Versions:
        """Open or make the files of a run, one in each directory, which are the run's until it is closed.

        Raises:
            VolumeError: A subclass says what is wrong with which directory; one is that a file is missing that commits need.
        """
        wanted = as_directories(directories)
        for directory in wanted:
            run.lock(directory.path)
        names = [f"{_NAME}-{i}-of-{len(wanted)}" for i in range(1, len(wanted) + 1)]
        is_there = [_exists(each.path, name) for each, name in zip(wanted, names, strict=True)]
        if any(is_there) and not is_there[0]:
            raise VolumeError(
                wanted[0].path,
                f"{str(wanted[is_there.index(True)].path)!r} holds a part of a run whose first directory is another one than "
                f"{str(wanted[0].path)!r}: name the same directories in the same order, or remove them to begin anew",
            )
        for directory, name in zip(wanted, names, strict=True):
            run.claim(directory.path, name)
        with limits_in_words():
            volume = Volume(
                directories,
                volume_bytes,
                stripe_bytes=_STRIPE_BYTES,
                direct=config.direct,
                file_name=_NAME,
                is_there=bool(run.commits()),
            )
            with closed_unless_made(volume.close):
                backend = open_backend(volume, config)
            with closed_unless_made(backend.close, config.deadline_seconds):
                return cls(run, backend, volume.sync, capacity_bytes, config, busy=busy)

    @property
    def kept(self) -> list[int]:
        """Numbers of the commits that can be gone back to, the newest first."""
        return sorted(self._kept, reverse=True)

    def recover(self, number: int) -> None:
        """Protect what the newest commit and those that it keeps name. To be called before anything is written.

        Raises:
            DurableRunError: It is not what was written.
        """
        newest = _read(self._run, number)
        kept = {number: newest["runs"]}
        there = self._run.commits()
        for old in newest["kept"].tolist():
            if old in there:
                try:
                    kept[old] = _read(self._run, old)["runs"]
                except DurableRunError as error:
                    if error.kind != "damaged":
                        raise
                    logger.warning("commit %d cannot be gone back to: %s", old, error)
        self._kept = kept
        self._slots.retain(kept)

    def begin(
        self, number: int, parts: Callable[[], Sequence[bytes]], keep: Sequence[int], ready: Callable[[], None]
    ) -> None:
        """Start to make a commit of what is the present when ``ready`` returns; see `wait`.

        Until that has returned, the only writes are those that ``ready`` waits for. Reads go on.

        Args:
            number: Larger than those of all commits before.
            parts: Gives what else belongs to it, when ``ready`` has returned. In a thread of its own, as that.
            keep: Older commits that are to stay; the others go.
            ready: Waits until all writes that belong to it were started.

        Raises:
            OSError, SwapperError: See `wait`.
        """
        self.wait()

        def make() -> None:
            try:
                ready()
                self.swapper.flush()
                staying = np.array([old for old in keep if old in self._kept], dtype=np.int64)
                known = {"runs": self._slots.snapshot(), "kept": staying, **self._checked.checksums()}
                self._write(number, known, parts())
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=make, name="swapper-commit", daemon=True)
        start_threads(self._thread)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the commit that was begun last survives whatever happens to process and machine, or after so long.

        Raises:
            OSError: It, or an earlier one, could not be made, and no later one can be. All before are as they were.
            SwapperError: The same, because a write had failed.
        """
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_UP_SECONDS if timeout_seconds is None else timeout_seconds)
            if timeout_seconds is not None:
                return
        self._thread = None
        if self._failure is not None:
            raise self._failure

    def go_to(self, number: int, as_number: int | None = None) -> list[bytes]:
        """Make what a commit holds the present; returns what else belongs to it. No request may be on its way.

        Args:
            number: Of the commit.
            as_number: Go back: the commit becomes the newest one by this number, larger than all others, and those after it
                are gone. That happens at once or, after a crash, not at all.

        Raises:
            DurableRunError: It is not what was written.
            OSError: It could not be made the newest; the present is as it was.
            SwapperError: An earlier commit failed.
        """
        self.wait()
        _, *parts = self._run.read(number)
        known = _read(self._run, number)
        self.swapper.flush()
        if as_number is not None:
            older = [old for old in self.kept if old < number]
            self._write(as_number, {**known, "kept": np.array(older, dtype=np.int64)}, parts)
        self._slots.restore(known["runs"])
        self._checked.restore(known)
        return parts

    def _write(self, number: int, known: dict[str, Any], parts: Sequence[bytes]) -> None:
        data = io.BytesIO()
        np.savez(data, **known)
        try:
            self._sync()
            self._run.write(number, [data.getvalue(), *parts])
        except BaseException as error:  # what was written may be lost, also if it is tried again
            self._failure = error
            raise
        self._kept = {old: self._kept[old] for old in known["kept"].tolist()} | {number: known["runs"]}
        for old in self._run.commits():
            if old not in self._kept:
                self._run.remove(old)
        self._slots.retain(self._kept)


def _exists(directory: Path, name: str) -> bool:
    try:
        return (directory / name).exists()
    except OSError as error:
        raise VolumeError(
            directory, f"cannot look into {str(directory)!r}: {error_words(error)}; choose another directory"
        ) from error


def _read(run: RunDirectory, number: int) -> dict[str, Any]:
    data, *_ = run.read(number)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            return {name: found[name] for name in ("runs", "kept", "checksums", "is_whole", "segments")}
    except Exception as error:
        raise DurableRunError.damaged(run.path / str(number), f"its map cannot be read: {error}") from error
