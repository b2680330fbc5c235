"""A swapper whose bytes outlive its process, and that can return to earlier commits."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from swapper.backend import IOBackend
from swapper.config import SwapperConfig, round_up
from swapper.errors import DurableRunError, VolumeError, as_volume_error
from swapper.measure.choice import open_backend
from swapper.meters import BusyTimes
from swapper.swapper import Swapper
from swapper.sync.limits import limits_in_words, start_threads
from swapper.uncopyable import closed_unless_made
from swapper.volumes.directory import DirectoryLike, as_directories
from swapper.volumes.run_directory import RunDirectory
from swapper.volumes.volume import Volume
from swapper.wrappers.integrity import IntegrityBackend
from swapper.wrappers.versions import Runs, VersionedBackend

logger = logging.getLogger(__name__)
# Not request_bytes: the places of stripes follow from it, so it must be the same in each process that uses a run.
_STRIPE_BYTES = 1 << 20
_NAME = "states"
_LOOK_UP_SECONDS = 0.2  # between these joins, Python runs signal handlers: Ctrl-C ends a wait


class Versions:
    """The commits of a run directory, and a swapper of the present.

    All reads are verified by checksums. After a commit has failed, no later one can be made.

    Attributes:
        swapper: Reads and writes the present. Extents are allocated anew in each process, in the same order.

    Args:
        run: Where commits are written.
        backend: Moves the bytes. Its space is larger than ``capacity_bytes``, see :class:`VersionedBackend`.
        sync: Syncs the backend's writes to the drives; raises OSError if that fails.
        capacity_bytes: Space for all extents.
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
        self._kept: dict[int, Runs] = {}  # by number of a commit: its map from blocks to slots
        self._thread: threading.Thread | None = None  # makes the last commit, until wait() has seen its end
        # Of the first commit that failed, for good: the kernel may have dropped pages that a sync could not write.
        self._failure: BaseException | None = None

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
        """Open or make the files of a run, one in each directory, and lock the directories until the run is closed.

        Raises:
            VolumeError: A subclass says what is wrong with which directory; a file that commits need is missing, say.
        """
        wanted = as_directories(directories)
        for directory in wanted:
            run.lock(directory.path)
        names = [f"{_NAME}-{i}-of-{len(wanted)}" for i in range(1, len(wanted) + 1)]
        is_there = []
        for directory, name in zip(wanted, names, strict=True):
            with as_volume_error(directory.path, f"cannot look into {str(directory.path)!r}"):
                is_there.append((directory.path / name).exists())
        if any(is_there) and not is_there[0]:
            raise VolumeError(
                wanted[0].path,
                f"{str(wanted[is_there.index(True)].path)!r} holds a part of a run whose first directory is another one than "
                f"{str(wanted[0].path)!r}: name the same directories in the same order, or remove them to begin anew",
            )
        for directory, name in zip(wanted, names, strict=True):
            run.claim(directory.path, name)  # before the volume makes them: an unclaimed file is another program's
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
        """Numbers of the commits that `go_to` accepts, the newest first."""
        return sorted(self._kept, reverse=True)

    def recover(self, number: int) -> None:
        """Protect the slots of the newest commit and of those that it keeps. Call it before the first write.

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
                    if error.kind != "damaged":  # of another version: writes could overwrite its slots, unknown here
                        raise
                    logger.warning("commit %d cannot be restored: %s", old, error)
        self._kept = kept
        self._slots.retain(kept)

    def begin(
        self, number: int, parts: Callable[[], Sequence[bytes]], keep: Sequence[int], ready: Callable[[], None]
    ) -> None:
        """Start to commit the present in a thread of its own; see `wait`.

        Until `wait` returns, start no writes but those that ``ready`` waits for. Reads may go on.

        Args:
            number: Larger than those of all commits before.
            parts: Called on that thread after ``ready``; returns other bytes to be stored with the commit.
            keep: Older commits to be kept; the others are removed.
            ready: Called on that thread; returns when all writes that belong to the commit have been started.

        Raises:
            OSError, SwapperError: See `wait`.
        """
        self.wait()

        def make() -> None:
            try:
                ready()
                self.swapper.flush()  # the map and the checksums change when a write ends
                staying = np.array([old for old in keep if old in self._kept], dtype=np.int64)
                known = {"runs": self._slots.snapshot(), "kept": staying, **self._checked.checksums()}
                self._write(number, known, parts())
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=make, name="swapper-commit", daemon=True)
        start_threads(self._thread)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the last commit would survive a crash of the machine, or for ``timeout_seconds``.

        Raises:
            OSError: This or an earlier commit failed, and no later one can be made. Those before are unchanged.
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
        """Go back to a commit, and return the other bytes that were stored with it. No request may be on its way.

        Args:
            number: Of the commit.
            as_number: Go back: store it as the newest commit, by this number, which is larger than all others. Its old
                number and all later commits are removed. After a crash, all or nothing of that has happened.

        Raises:
            DurableRunError: It is not what was written.
            OSError: It could not be made the newest; the present is unchanged.
            SwapperError: An earlier commit failed.
        """
        self.wait()
        _, *parts = self._run.read(number)
        known = _read(self._run, number)
        self.swapper.flush()
        if as_number is not None:
            older = [old for old in self.kept if old < number]
            self._write(as_number, {**known, "kept": np.array(older, dtype=np.int64)}, parts)
        self._slots.restore(known["runs"])  # only now: after an error above, the present stays
        self._checked.restore(known)
        return parts

    def _write(self, number: int, known: dict[str, Any], parts: Sequence[bytes]) -> None:
        data = io.BytesIO()
        np.savez(data, **known)
        # The order: the slots are on the drives before a commit names them; that commit is, before older ones go; and
        # these have gone before retain() allows to overwrite their slots. A crash in between leaves the older commits
        # whole.
        try:
            self._sync()
            self._run.write(number, [data.getvalue(), *parts])
        except BaseException as error:
            self._failure = error
            raise
        self._kept = {old: self._kept[old] for old in known["kept"].tolist()} | {number: known["runs"]}
        for old in self._run.commits():
            if old not in self._kept:
                self._run.remove(old)
        self._slots.retain(self._kept)


def _read(run: RunDirectory, number: int) -> dict[str, Any]:
    data, *_ = run.read(number)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            return {name: found[name] for name in ("runs", "kept", "checksums", "is_whole", "segments")}
    except Exception as error:
        raise DurableRunError.damaged(run.path / str(number), f"its map cannot be read: {error}") from error
