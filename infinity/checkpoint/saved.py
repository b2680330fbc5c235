"""A checkpoint's directory: read, verified and written without a model or an engine.

checkpoint = Checkpoint.open("checkpoints")  # the newest; or of a tag
for tensor in checkpoint.tensors:
    print(tensor.fqn, tensor.kind, tensor.shape, tensor.dtype)
    for start, part in tensor.parts():       # 1-D, a few MiB each, checked
        ...
checkpoint.verify()                          # reads all of it
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infinity.checkpoint.arrays import (
    CHUNK_BYTES,
    TENSORS,
    ArraySpec,
    ArrayWriter,
    as_storage_error,
    group_metadata,
    reading_from,
)
from infinity.checkpoint.arrays import SavedTensor as SavedTensor  # for users, as WEIGHT
from infinity.checkpoint.foreign_arrays import found_arrays
from infinity.checkpoint.manifest import (
    MANIFEST,
    check_file,
    completed_at,
    facts_of,
    manifest_of,
    read_checked,
    read_manifest,
)
from infinity.checkpoint.training_state_checks import check_training_state
from infinity.errors import CheckpointError, StorageError, format_bytes
from infinity.numerics.chunk_format import WEIGHT as WEIGHT
from infinity.numerics.plain_data import UNREADABLE, from_json, to_json
from swapper.volumes.block_files import BlockThreads, free_bytes
from swapper.volumes.publish import Staging, exchange, locked, sync_directory, sync_tree

logger = logging.getLogger(__name__)

_FILE_BYTES = 12 << 10  # estimate, per tensor, of the space for its folders and zarr.json files

LATEST, TRAINING_STATE, RAW = "latest", "training.json", "training.bin"
_PLAIN_DATA = (
    "Give client_state (and schedulers and modules as their state) numbers, texts, bytes, tensors, NumPy arrays, lists, tuples, "
    "sets and dicts of these, without references to themselves. For an object, give its state_dict() or vars()"
)
T = TypeVar("T")
# Attempts to read a checkpoint that another process replaces meanwhile. A process that saves faster than this one reads
# would otherwise keep it here forever.
_MOST_READS = 5
# File systems allow names of 255 bytes. Until it is complete, a checkpoint has 25 more: ".", ".saving-", 16 digits.
_MOST_TAG_BYTES = 255 - 26

EXCLUDED, EXCLUDED_CHECKSUMS, TIED, BASE = "excluded", "excluded_checksums", "tied", "base"
"""Keys in training.json of the fields of `Omitted`. ``base`` has both the base's name and the formats."""


@dataclass(frozen=True)
class Omitted:
    """What a checkpoint says about tensors that it has no array for.

    Attributes:
        excluded: FQNs of the frozen parameters that were left out.
        checksums: FQN of each -> its dtype, and the crc32c of its elements; empty if an earlier version wrote it.
        base: name or path of the base model, from the model's config.
        formats: FQN -> `frozen_dtype` of weights that were stored packed.
        tied: other FQNs of tied parameters and buffers -> the FQN that has the array.
    """

    excluded: list[str]
    checksums: dict[str, tuple[str, int]]
    base: str
    formats: dict[str, str]
    tied: dict[str, str]


class Checkpoint:
    """One checkpoint.

    Attributes:
        folder: its directory.
        tensors: all of them; each (group, FQN, kind) once.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the manifest, and compares the sizes of all files.

        Raises:
            CheckpointError: it is damaged, of a newer version, or no checkpoint.
        """
        self.folder = folder
        self.tensors, self._files = read_manifest(folder)
        self._by_name = {(each.group, each.fqn, each.kind): each for each in self.tensors}
        if len(self._by_name) != len(self.tensors):
            raise CheckpointError(folder / MANIFEST, "it has a tensor twice")
        self.largest_block = max([CHUNK_BYTES + 4096, *(each.block_bytes for each in self.tensors if each.shape)])
        """Bytes of the largest block, for `BlockThreads`. Programs that write our format may choose larger chunks."""

    @classmethod
    def open(cls, directory: str | Path, tag: str | int | None = None) -> Checkpoint:
        """Open the checkpoint of a tag, or the newest one. ``directory`` may also be a checkpoint itself.

        Raises:
            CheckpointError: there is none.
        """
        directory = Path(directory)
        with reading_from(directory):
            if tag is None and (directory / MANIFEST).is_file():
                return cls(directory)
        folder = find(directory, None if tag is None else str(tag))
        if folder is None:
            wanted = f"checkpoint {tag!r}" if tag is not None else f"file '{LATEST}'"
            cure = "Give a directory that engine.save_checkpoint has written to"
            raise CheckpointError(directory, f"there is no {wanted} in it", cure=cure)
        return cls(folder)

    def tensor(self, group: str, fqn: str, kind: str = WEIGHT) -> SavedTensor | None:
        """One of the tensors; None if the checkpoint does not have it."""
        return self._by_name.get((group, fqn, kind))

    def of(self, group: str) -> Mapping[str, SavedTensor]:
        """FQN -> weight, of "parameters" or "buffers"."""
        return {each.fqn: each for each in self.tensors if each.group == group and each.kind == WEIGHT}

    @functools.cached_property
    def omitted(self) -> Omitted:
        """Names that the checkpoint lists beside its arrays: tied and excluded parameters, and the base model.

        Raises:
            CheckpointError: it is damaged.
        """
        try:
            found = json.loads(read_checked(self.folder, self._files, TRAINING_STATE))
            base, checksums = found.get(BASE) or {}, found.get(EXCLUDED_CHECKSUMS) or {}
            return Omitted(
                [str(fqn) for fqn in found.get(EXCLUDED) or []],
                {str(fqn): (str(dtype), int(checksum)) for fqn, (dtype, checksum) in checksums.items()},
                str(base.get("name", "")),
                {str(fqn): str(name) for fqn, name in base.get("formats", {}).items()},
                {str(fqn): str(first) for fqn, first in (found.get(TIED) or {}).items()},
            )
        except UNREADABLE as error:
            raise CheckpointError(self.folder / TRAINING_STATE, "it is not what a checkpoint has") from error

    def training_state(self) -> dict[str, Any]:
        """Everything but large tensors: counters, groups, scalars, scheduler, random states, ``client_state``.

        Raises:
            CheckpointError: it is damaged.
        """
        text = read_checked(self.folder, self._files, TRAINING_STATE)
        raw = read_checked(self.folder, self._files, RAW) if RAW in self._files else b""
        try:
            found = from_json(text, raw)
            check_training_state(found)
        except UNREADABLE as error:
            problem = f"its contents are not those of a checkpoint: {str(error)[:200] or type(error).__name__}"
            raise CheckpointError(self.folder / TRAINING_STATE, problem) from error
        return found  # type: ignore[no-any-return]

    def verify_small_files(self) -> int:
        """As `verify`, but without large tensors: their chunks are checked whenever they are read."""
        return sum(check_file(self.folder, self._files, name) for name in self._files)

    def verify(self) -> int:
        """Read everything and compare all checksums. Returns the number of bytes.

        Raises:
            CheckpointError: a file is damaged; the message names it.
        """
        num_bytes = self.verify_small_files()
        with BlockThreads(self.largest_block) as threads:
            for tensor in self.tensors:
                for _ in tensor.parts(threads):
                    pass
                num_bytes += tensor.file_bytes
        return num_bytes


def find(directory: Path, tag: str | None) -> Path | None:
    """The directory of the checkpoint of that tag, or of the one that ``latest`` names; None if there is none.

    Raises:
        CheckpointError: ``latest`` names a directory that does not exist, or cannot be read.
    """
    latest = directory / LATEST
    with reading_from(directory):
        if tag is not None:
            return directory / tag if (directory / tag).is_dir() else None
        tag = _latest(directory)
        if tag is None:
            return None
        # `latest` is a text that anybody may edit: a tag with a slash would lead out of the directory.
        if not is_tag(tag) or not (directory / tag).is_dir():
            problem = f"it names {tag!r}, and there is no such checkpoint beside it"
            raise CheckpointError(latest, problem, cure="Give the tag of one that is there")
        return directory / tag


def _latest(directory: Path) -> str | None:
    """The tag in the file ``latest``; None if there is no such file."""
    latest = directory / LATEST
    return latest.read_bytes()[:4096].decode(errors="replace").strip() if latest.is_file() else None


def reading_again(folder: Path, read: Callable[[], T]) -> T:
    """Call ``read``, which reads a checkpoint: again if another process has replaced the checkpoint meanwhile."""
    for _ in range(_MOST_READS - 1):
        version = _version_of(folder)
        try:
            return read()
        except CheckpointError:
            if _version_of(folder) == version:
                raise
            logger.warning("'%s' was replaced by another process while it was read: it is read again", folder)
    return read()


def _version_of(folder: Path) -> tuple[int, int] | None:
    """Inode and time of the manifest, which differ for another checkpoint of the same name."""
    try:
        manifest = (folder / MANIFEST).stat()
    except OSError:
        return None
    return manifest.st_ino, manifest.st_mtime_ns


def _is_foreign(folder: Path) -> bool:
    """Whether a directory has files, but is not a checkpoint of this package, complete or damaged."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    manifest = folder / MANIFEST
    return not manifest.is_file() or completed_at(manifest) is None


def is_tag(tag: str) -> bool:
    """Whether a tag can be a directory's name, and comes back unchanged from the file ``latest``."""
    is_text = tag == tag.strip() == tag.encode(errors="replace").decode() and len(tag.encode()) <= _MOST_TAG_BYTES
    return bool(tag) and is_text and "/" not in tag and "\0" not in tag and tag not in (".", "..", LATEST)


# -------------------------------------------------------------------------------------------------------------- writing


class CheckpointFiles:
    """Writes the files of one checkpoint. Used by one thread at a time."""

    def __init__(
        self, folder: Path, specs: Sequence[ArraySpec], threads: BlockThreads, stack: contextlib.ExitStack
    ) -> None:
        """``specs``: of all tensors. ``stack``: closes the files at its end."""
        self._folder = folder
        self._specs = specs
        self._threads = threads
        self._stack = stack
        self._writers: dict[ArraySpec, ArrayWriter] = {}
        for group in ("", "parameters", "buffers"):
            _make_group(folder / TENSORS / group)

    def open_array(self, spec: ArraySpec) -> ArrayWriter:
        """The writer of the elements of a tensor, in C order. Several may be open; each holds a block of memory."""
        # Tiles of one weight have the same spec: each continues in the array of the tile before.
        if spec in self._writers:
            return self._writers[spec]
        place = self._folder / spec.path
        if not place.parent.exists():
            _make_group(place.parent)
        place.mkdir()
        self._writers[spec] = writer = ArrayWriter(self._threads, place, spec)
        self._stack.callback(writer.close)
        return writer

    def write_training_state(self, training_state: Mapping[str, Any]) -> None:
        """Write everything but large tensors: "counters", "client_state", "param_groups", ... Call it once."""
        raw = bytearray()
        try:
            text = to_json(dict(training_state), raw, "the checkpoint")
        except Exception as error:  # whatever the objects' classes raise
            reason = str(error) or type(error).__name__
            raise CheckpointError(self._folder, f"its values cannot be written: {reason}", cure=_PLAIN_DATA) from error
        (self._folder / TRAINING_STATE).write_text(text)
        if raw:
            (self._folder / RAW).write_bytes(raw)

    def finish(self, time: int) -> None:
        """Wait until all tensors are written, and write the manifest. ``time``: now, in nanoseconds since 1970.

        Raises:
            RuntimeError: a tensor has too few elements.
        """
        for spec in self._specs:
            if not self.open_array(spec).is_complete:  # opening it makes the folder of a tensor without elements
                raise RuntimeError(f"'{spec.fqn}' ({spec.kind}) has got too few elements")
        self._threads.finish()
        arrays = [(spec, writer.checksum) for spec, writer in self._writers.items()]
        # The manifest gives these files' sizes and checksums by shape and array. Files of 0-d arrays are small ones.
        large = {f"{spec.path}/{spec.file_name}" for spec in self._writers if spec.shape}
        (self._folder / MANIFEST).write_bytes(manifest_of(arrays, _files_of(self._folder, large), time))


def _files_of(folder: Path, but: Container[str]) -> dict[str, tuple[int, int]]:
    """Path -> bytes and checksum, of all files of a checkpoint except ``but``."""
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder):
        # A linked folder would be left out, since `walk` does not enter it. Whoever opens a pipe waits.
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for path in (Path(place, name) for name in (*links, *names)):
            if not path.is_file():
                problem = "it is neither a file nor a folder, but a pipe, a device or a link"
                raise CheckpointError(path, problem, cure="Put the folder itself there, or remove it")
            found[str(path.relative_to(folder))] = path
    return {name: facts_of(path) for name, path in found.items() if name not in but}


@contextlib.contextmanager
def writing(
    directory: Path,
    tag: str,
    specs: Sequence[ArraySpec],
    *,
    is_latest: bool,
    keep_last: int | None = None,
    num_threads: int = 8,
) -> Iterator[CheckpointFiles]:
    """Write a checkpoint inside the ``with`` block. It appears at the end, and replaces one of the same tag.

    Args:
        directory: made if it is missing.
        tag: name of the checkpoint.
        specs: of all tensors.
        is_latest: whether ``latest`` names it afterwards.
        keep_last: number of checkpoints to keep, this one included; None: all.
        num_threads: blocks of 2 MiB that are written at a time.

    Raises:
        StorageError: the directory cannot be written to or is full; its old checkpoints are still there.
        ValueError: the tag cannot be a directory's name.
    """
    if not is_tag(tag):
        raise ValueError(f"a checkpoint's tag must be the name of a directory, not {tag!r}")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last counts the new checkpoint, so it is 1 or more, not {keep_last}")
    needed = sum(each.file_bytes + _FILE_BYTES for each in specs)
    with as_storage_error(directory, needed, "the checkpoint"):
        if os.path.lexists(directory / tag) and not (directory / tag).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"'{tag}' in it is not a directory")
        if _is_foreign(directory / tag):
            problem = f"has a directory '{tag}' that is not a checkpoint of this package, and is not replaced"
            raise StorageError(directory, problem, cure="Give another directory or tag, or remove it")
        with Staging(directory, tag) as staging:
            # Before anything is written. The old checkpoint of this tag stays until the end, so its space does not
            # count.
            available = free_bytes(directory)
            if available < needed:
                problem = f"has {format_bytes(available)} free, and the checkpoint takes {format_bytes(needed)}"
                cure = "Give one with more room, or remove older checkpoints; nothing has been written"
                raise StorageError(directory, problem, cure=cure)
            folder = staging.path / "checkpoint"
            folder.mkdir()
            # Blocks of `ArraySpec.block_bytes`: a chunk, and one block of 4096 bytes with its checksum.
            with BlockThreads(CHUNK_BYTES + 4096, num_threads) as threads, contextlib.ExitStack() as stack:
                files = CheckpointFiles(folder, specs, threads, stack)
                yield files
                # keep_last removes by this time. A clock that was set back must not make the new checkpoint the oldest
                # one.
                newest = max((since for since, _ in _complete(directory)), default=0)
                files.finish(max(time.time_ns(), newest + 1))
            # Everything is on the drive before it gets its name, and `latest` names it only afterwards. So after a
            # crash at any moment, `latest` names a complete checkpoint.
            sync_tree(folder)
            with staging.file(LATEST) as file:
                file.write(tag.encode())
            with locked(directory):
                # A checkpoint that this replaces is now in the hidden directory, and is removed with it.
                exchange(folder, directory / tag)
                if is_latest:
                    staging.publish([], [], (LATEST, LATEST), lambda name: False)
                if keep_last is not None:
                    _retire(directory, tag, keep_last, staging.path)


def tags(directory: Path) -> list[str]:
    """The tags of the complete checkpoints in a directory, oldest first."""
    return [tag for _, tag in _complete(directory)]


def _complete(directory: Path) -> list[tuple[int, str]]:
    """Pairs (completion time in nanoseconds, tag) of the complete checkpoints in a directory, oldest first."""
    found: list[tuple[int, str]] = []
    for path in directory.iterdir():
        manifest = path / MANIFEST
        with contextlib.suppress(OSError):  # unreadable (lost+found), or removed meanwhile
            if not path.is_symlink() and not path.name.startswith(".") and manifest.is_file():
                since = completed_at(manifest)
                found += [] if since is None else [(since, path.name)]
    return sorted(found)


def _retire(directory: Path, newest: str, keep_last: int, aside: Path) -> None:
    """Move the oldest complete checkpoints to ``aside``, except the newest and the one that ``latest`` names."""
    there = tags(directory)
    staying = {newest, _latest(directory)}.intersection(there)
    others = [name for name in there if name not in staying]
    # keep_last = 3: the new one, usually named by `latest`, and the 2 newest others. If `latest` names another one
    # (is_latest=False), that stays, and 1 other.
    num_others = max(keep_last - len(staying), 0)
    for name in others[: max(len(others) - num_others, 0)]:
        try:
            (directory / name).replace(aside / f"old-{name}")
        except OSError as error:  # the save itself has succeeded, so no error
            logger.warning(
                "the checkpoint '%s' stays, although it is older than keep_last: %s", directory / name, error
            )
    sync_directory(directory)


def seal(folder: Path) -> Checkpoint:
    """Write a checkpoint's manifest anew, after another program has changed arrays in its directory.

    Raises:
        CheckpointError: zarr cannot read an array, its name or dtype is not a checkpoint's, or something is no file.
        StorageError: the manifest cannot be written.
    """
    files = _files_of(folder, {MANIFEST})
    # None: from now on zarr reads all arrays, those that the program did not change as well.
    arrays: list[tuple[ArraySpec, None]] = [(spec, None) for spec in found_arrays(folder)]
    contents = manifest_of(arrays, files, time.time_ns())
    with as_storage_error(folder, len(contents), "a manifest"), Staging(folder.parent, folder.name) as staging:
        (staging.path / MANIFEST).write_bytes(contents)
        sync_tree(folder)
        sync_tree(staging.path)
        (staging.path / MANIFEST).replace(folder / MANIFEST)
        sync_directory(folder)
    return Checkpoint(folder)


def _make_group(folder: Path) -> None:
    folder.mkdir()
    (folder / "zarr.json").write_text(group_metadata())
