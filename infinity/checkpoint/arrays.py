"""One tensor of a checkpoint as one zarr v3 array in one file, written and read from front to end.

The layout of the file is in docs/reference/checkpoint-format.md.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from infinity.errors import CheckpointError, ModelError, StorageError, format_bytes
from infinity.numerics.raw_bytes import raw_bytes
from swapper import SwapperError
from swapper.errors import limit_cure
from swapper.volumes.block_files import BlockFile, BlockThreads
from swapper.wrappers.checksum import crc32c

# The unit of checking, reading and writing. Each block in flight takes this much memory. Every chunk adds up to 4096
# bytes to the file (checksum and padding) and 16 bytes to the index.
CHUNK_BYTES = 2 << 20
TENSORS = "tensors.zarr"
_ALIGNMENT = 4096  # direct I/O: offset, size and address of a block are multiples of it
_CRC_BYTES = 4  # zarr's crc32c codec appends it to each chunk and to the index
# Chunks that are read and checked while the caller uses one: four blocks of memory in all.
_READ_AHEAD = 3
_MOST_LETTERS = 250  # of a folder's name; file systems allow 255 bytes
_Bytes = npt.NDArray[np.uint8]
_Sums = npt.NDArray[np.uint32]
_IN_ZARR = (
    *("float64", "float32", "float16", "int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128"),
)
STORED_AS = {
    **{name: name for name in _IN_ZARR},
    "bfloat16": "uint16",
    **{f"float8_{kind}": "uint8" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
}
"""torch's dtype -> zarr's. A dtype that zarr lacks is stored as its bits, in an unsigned integer of the same size."""


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name in files: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype | None:
    """The inverse of `name_of`; None for a name that arrays do not support."""
    return getattr(torch, name, None) if name in STORED_AS else None


@dataclass(frozen=True)
class ArraySpec:
    """Where one array is, what it holds, and how its file is laid out.

    Attributes:
        group: "parameters" or "buffers".
        fqn: of the parameter or buffer.
        kind: `WEIGHT`, or the name of an optimizer state (fp32).
        shape: of the tensor; the order of elements is C's.
        dtype: of the tensor: fp32 for main weights and states.
        chunk: shape of an inner chunk: it is contiguous in the tensor.
    """

    group: str
    fqn: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: tuple[int, ...]

    @classmethod
    def of(cls, group: str, fqn: str, kind: str, shape: Sequence[int], dtype: torch.dtype) -> ArraySpec:
        """Make the description of an array with chunks of at most `CHUNK_BYTES`.

        Raises:
            ModelError: the format does not support the dtype.
        """
        if name_of(dtype) not in STORED_AS:
            problem = f"'{fqn}' is {dtype}, which a checkpoint cannot store"
            raise ModelError(problem, cure="Cast it to another dtype", fqn=fqn)
        # An fp32 weight of shape (4096, 4096), from here to `file_bytes`:
        #   at most 524288 elements a chunk, so chunk = (128, 4096), grid = (32, 1), data_bytes = 2 MiB
        #   block_bytes = 2 MiB + 4096: the 4 bytes of the checksum fill up to the next multiple of 4096
        #   index_bytes = 16 * 32 + 4 = 516, so chunk i starts at 4096 + i * block_bytes
        #   file_bytes = 4096 + 32 * block_bytes
        return cls(group, fqn, kind, tuple(shape), dtype, chunk_of(shape, max(CHUNK_BYTES // dtype.itemsize, 1)))

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks in each dimension."""
        return tuple(-(-size // part) for size, part in zip(self.shape, self.chunk, strict=True))

    @property
    def num_chunks(self) -> int:
        """Number of chunks in all."""
        return math.prod(self.grid)

    @property
    def data_bytes(self) -> int:
        """Bytes of one chunk without its checksum. Chunks at the edge have as many: zeros fill them up."""
        return math.prod(self.chunk) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes from the start of a chunk to the start of the next."""
        return _aligned(self.data_bytes + _CRC_BYTES)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the start of the file, with its checksum."""
        return 16 * self.num_chunks + _CRC_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes of the file. 0: a tensor without elements has no file."""
        if not self.num_chunks:
            return 0
        # A 0-d array has no dimension to shard, so its file is the chunk alone: no index, no padding.
        if not self.shape:
            return self.data_bytes + _CRC_BYTES
        return _aligned(self.index_bytes) + self.num_chunks * self.block_bytes

    @property
    def file_name(self) -> str:
        """The key that zarr gives the only shard: "0.0" for a matrix."""
        return ".".join("0" * len(self.shape)) or "0"

    @property
    def path(self) -> str:
        """The array's folder inside the checkpoint."""
        return f"{TENSORS}/{self.group}/{_folder(self.fqn)}/{_folder(self.kind)}"

    def index(self) -> _Bytes:
        """The start of the file up to the first chunk, as uint8: offset and bytes of each chunk, a checksum, zeros."""
        start, size = _aligned(self.index_bytes), self.data_bytes + _CRC_BYTES
        table = np.empty((self.num_chunks, 2), dtype="<u8")
        table[:, 0] = np.arange(self.num_chunks, dtype=np.uint64) * np.uint64(self.block_bytes) + np.uint64(start)
        table[:, 1] = size
        data = table.tobytes()
        data += struct.pack("<I", crc32c(np.frombuffer(data, np.uint8)))
        return np.frombuffer(data.ljust(start, b"\0"), np.uint8)

    def regions(self) -> Iterator[tuple[slice, ...]]:
        """The slices of the tensor that each chunk holds, in the order of the file."""
        starts = (range(0, size, part) for size, part in zip(self.shape, self.chunk, strict=True))
        for corner in itertools.product(*starts) if self.numel else ():
            bounds = zip(corner, self.chunk, self.shape, strict=True)
            yield tuple(slice(start, min(start + part, size)) for start, part, size in bounds)

    def spans(self) -> Iterator[tuple[int, int]]:
        """The elements [first, last) of each chunk, numbered in C order, in the order of the file."""
        first = 0
        # Each chunk is contiguous in the tensor, so a chunk begins where the one before ends.
        for region in self.regions():
            last = first + math.prod(each.stop - each.start for each in region)
            yield first, last
            first = last

    def metadata(self) -> str:
        """The contents of ``zarr.json``, as zarr writes it."""
        document = json.loads(_array_document(self.shape, STORED_AS[name_of(self.dtype)], self.chunk, self.grid))
        attributes = {"fqn": self.fqn, "kind": self.kind, "dtype": name_of(self.dtype)}
        return json.dumps({**document, "attributes": attributes})


@dataclass(frozen=True)
class SavedTensor(ArraySpec):
    """One tensor of a checkpoint.

    Attributes:
        checksum: crc32c over the chunks' crc32c, 4 bytes each.
        folder: of the checkpoint.
    """

    checksum: int
    folder: Path

    def parts(self, threads: BlockThreads | None = None) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield the tensor in parts: the first element's number (in C order), and 1-D elements on the CPU.

        A part is valid until you ask for the next one. ``threads`` read; None: it starts its own.

        Raises:
            CheckpointError: the file is damaged, or it is that of another checkpoint.
        """
        if not self.num_chunks:
            return
        # The reading threads fill it: each writes the element of its own chunk, so it needs no lock.
        found: _Sums = np.zeros(self.num_chunks, dtype="<u4")
        with contextlib.ExitStack() as stack, reading_from(self.file):
            blocks = threads or stack.enter_context(BlockThreads(max(CHUNK_BYTES, self.block_bytes)))
            yield from self._blocks(blocks, found) if self.shape else self._small(found)
        # Each chunk fits to its own checksum even if the file is another checkpoint's. Only the manifest's checksum
        # finds that.
        if crc32c(found.view(np.uint8)) != self.checksum:
            self._fail("its chunks are others than those that were saved")

    @property
    def file(self) -> Path:
        """The file with the elements. A tensor without elements has none."""
        return self.folder / self.path / self.file_name

    def read(self, threads: BlockThreads | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """Read the whole tensor into memory, or into ``into``: contiguous, of the tensor's shape and dtype.

        Raises:
            CheckpointError: see `parts`.
        """
        whole = torch.empty(self.shape, dtype=self.dtype, device="cpu") if into is None else into
        flat = whole.view(-1)
        for start, part in self.parts(threads):
            flat[start : start + part.numel()].copy_(part)
        return whole

    def _small(self, found: _Sums) -> Iterator[tuple[int, torch.Tensor]]:
        # A bytearray can be written to, as torch expects of memory that it makes a tensor of.
        data = np.frombuffer(bytearray(self.file.read_bytes()), np.uint8)
        self._check_size(data.size)
        self._check_chunk(data, 0, found)
        yield 0, torch.from_numpy(data[: self.data_bytes]).view(self.dtype)

    def _blocks(self, threads: BlockThreads, found: _Sums) -> Iterator[tuple[int, torch.Tensor]]:
        self._check_size(self.file.stat().st_size)
        file = BlockFile(self.file)
        start_of_chunks = _aligned(self.index_bytes)

        def read(number: int) -> Future[_Bytes]:
            offset = start_of_chunks + number * self.block_bytes
            return threads.read(file, self.block_bytes, offset, lambda data: self._check_chunk(data, number, found))

        # Each read begins when it is taken from here.
        reads = ((*span, read(number)) for number, span in enumerate(self.spans()))
        try:
            self._check_index(threads, file)
            pending = deque(itertools.islice(reads, _READ_AHEAD))
            while pending:
                first, last, reading = pending.popleft()
                block = reading.result()
                # The next read starts before the caller gets this chunk: the drive reads while the caller computes.
                pending.extend(itertools.islice(reads, 1))
                data = torch.from_numpy(block[: (last - first) * self.dtype.itemsize])
                yield first, data.view(self.dtype)
                # Not before the caller has asked for the next part: until then `data` is a view of the block.
                threads.release_block(block)
        except EOFError as error:
            raise CheckpointError(self.file, str(error)) from error
        finally:
            file.release()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes != self.file_bytes:
            self._fail(f"it has {num_bytes} bytes, not {self.file_bytes}")

    def _check_index(self, threads: BlockThreads, file: BlockFile) -> None:
        # The index follows from the spec. Chunks are read at computed offsets, and a damaged index would mislead only
        # zarr. In parts: the index of a large tensor may be longer than a block.
        expected = self.index()
        for start in range(0, expected.size, threads.block_bytes):
            part = expected[start : start + threads.block_bytes]

            def check(data: _Bytes, part: _Bytes = part) -> None:
                if not np.array_equal(data, part):
                    self._fail("its index is damaged")

            threads.release_block(threads.read(file, part.size, start, check).result())

    def _check_chunk(self, data: _Bytes, number: int, found: _Sums) -> None:
        # A reading thread runs this. The padding is checked, too, so that any flipped bit of the file is an error.
        size = self.data_bytes
        found[number] = crc32c(data[:size])
        if data[size : size + _CRC_BYTES].tobytes() != struct.pack("<I", found[number]) or data[size + 4 :].any():
            self._fail(f"chunk {number} is damaged: its bytes are not those that were written")

    def _fail(self, problem: str) -> None:
        raise CheckpointError(self.file, problem)


@functools.cache
def group_metadata() -> str:
    """The text of a group's ``zarr.json``."""
    import zarr

    return _document(zarr.create_group)


@functools.lru_cache
def _array_document(shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...], grid: tuple[int, ...]) -> str:
    """The text of an array's ``zarr.json`` without attributes. Cached: zarr takes milliseconds, layers are alike."""
    import zarr
    from zarr.codecs import Crc32cCodec

    shard = [number * part for number, part in zip(grid, chunk, strict=True)]
    return _document(
        zarr.create_array,
        shape=shape,
        dtype=dtype,
        chunks=chunk,
        # One shard holds all chunks, so an array is one file. A 0-d or empty array has none.
        shards={"shape": shard, "index_location": "start"} if math.prod(shard) and shard else None,
        compressors=Crc32cCodec(),
        # The file's key is then "0.0", beside zarr.json, and not "c/0/0", in two folders more.
        chunk_key_encoding={"name": "v2", "separator": "."},
    )


def _document(create: Callable[..., Any], **options: Any) -> str:
    # In memory: on a drive, zarr would leave a pool of threads behind.
    files: dict[str, Any] = {}
    create(files, **options)
    return str(files["zarr.json"].to_bytes(), "utf-8")


def _folder(name: str) -> str:
    """A name as a folder's name: percent-encoded, and shortened if it is too long."""
    quoted = quote(name, safe="", errors="surrogatepass")
    if len(quoted) <= _MOST_LETTERS:
        return quoted
    digest = hashlib.sha256(quoted.encode()).hexdigest()
    # Percent-encoding puts two hex digits after each "%". So "%-" occurs in no other name, and no two names share a
    # folder.
    return f"{quoted[: _MOST_LETTERS - 1 - len(digest)]}%-{digest}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def chunk_of(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """The shape of chunks of at most ``limit`` elements, each contiguous in a tensor of ``shape``."""
    # Whole inner dimensions, a part of one dimension, 1 in those outside of it. With limit = 524288:
    #   (1000, 4096): 4096 columns fit 128 times. 1000 rows need 8 chunks, so each has 1000 / 8 = 125 rows: (125, 4096)
    #   (8, 1024, 1024): 1024 columns fit 512 times: (1, 512, 1024)
    chunk, inner = [1] * len(shape), 1
    for axis in reversed(range(len(shape))):
        size = max(shape[axis], 1)
        if inner * size > limit:
            part = max(limit // inner, 1)
            # Chunks of about equal length: every chunk takes as much of the file as the largest, filled up with zeros.
            chunk[axis] = -(-size // -(-size // part))
            break
        chunk[axis] = size
        inner *= size
    return tuple(chunk)


class ArrayWriter:
    """Writes one array, whose elements come in C order. Used by one thread at a time."""

    def __init__(self, threads: BlockThreads, folder: Path, spec: ArraySpec) -> None:
        """``folder``: the array's own, which exists."""
        self.spec = spec
        self._threads = threads
        self._folder = folder
        self._spans = spec.spans()
        self._left = 0  # bytes that the open chunk still takes
        # The open chunk. Each open array holds one block, on top of those that `threads` has under way.
        self._block: _Bytes | None = None
        self._filled = 0  # bytes of the open chunk so far
        self._number = 0  # of the open chunk; after the last one, the number of chunks
        self._checksums = np.zeros(spec.num_chunks, dtype="<u4")
        self._file: BlockFile | None = None
        (folder / "zarr.json").write_text(spec.metadata())

    def write(self, values: torch.Tensor) -> None:
        """Append elements: 1-D, contiguous, on the CPU, of the array's dtype."""
        data = raw_bytes(values).numpy()
        itemsize = self.spec.dtype.itemsize
        while data.size:
            if self._block is None:
                first, last = next(self._spans)
                self._left, self._filled = (last - first) * itemsize, 0
                self._block = self._threads.acquire_block()
            part = data[: self._left]
            self._block[self._filled : self._filled + part.size] = part
            self._filled += part.size
            self._left -= part.size
            data = data[part.size :]
            if not self._left:
                self._send(self._block)

    def _send(self, block: _Bytes) -> None:
        spec, number, filled = self.spec, self._number, self._filled
        self._block = None
        self._number += 1

        # A writing thread runs this, so that checksums do not take the caller's time.
        def close_block() -> None:
            # Blocks are reused: zeros replace what the last chunk left behind this one's elements.
            block[filled : spec.block_bytes] = 0
            checksum = crc32c(block[: spec.data_bytes])
            self._checksums[number] = checksum
            block[spec.data_bytes : spec.data_bytes + _CRC_BYTES] = np.frombuffer(struct.pack("<I", checksum), np.uint8)

        if not spec.shape:
            close_block()
            (self._folder / spec.file_name).write_bytes(block[: spec.file_bytes].tobytes())
            self._threads.release_block(block)
            return
        if self._file is None:
            self._file = BlockFile(self._folder / spec.file_name, spec.file_bytes)
        offset = _aligned(spec.index_bytes) + number * spec.block_bytes
        self._threads.write(self._file, block, spec.block_bytes, offset, close_block)
        # The file stays open until the threads have written its last block.
        if self.is_complete:
            self._write_index(self._file)
            self.close()

    def _write_index(self, file: BlockFile) -> None:
        data = self.spec.index()
        for start in range(0, data.size, self._threads.block_bytes):
            part = data[start : start + self._threads.block_bytes]
            block = self._threads.acquire_block()
            block[: part.size] = part
            self._threads.write(file, block, part.size, start, lambda: None)

    @property
    def is_complete(self) -> bool:
        """Whether all elements were written to it."""
        return self._number == self.spec.num_chunks

    def close(self) -> None:
        """Close the file, complete or not. May be called again."""
        file, self._file = self._file, None
        if file is not None:
            file.release()

    @property
    def checksum(self) -> int:
        """crc32c over all chunks' crc32c. Valid when the threads have written all blocks."""
        return crc32c(self._checksums.view(np.uint8))


@contextlib.contextmanager
def reading_from(path: Path) -> Iterator[None]:
    """Turn an OSError of the ``with`` block into a `CheckpointError` that names ``path``."""
    try:
        yield
    except OSError as error:
        limit = limit_cure(error)
        cure = "Give this process read permission, mount the drive, or load another checkpoint"
        problem = f"it cannot be read: {error.strerror or error}"
        raise CheckpointError(path, problem, cure=f"To read it, {limit}" if limit else cure) from error


@contextlib.contextmanager
def as_storage_error(directory: Path, num_bytes: int, what: str) -> Iterator[None]:
    """Turn an OSError of the ``with`` block into a `StorageError`. ``num_bytes``: of all files that are written."""
    try:
        yield
    except SwapperError:  # some are OSErrors as well, of the drives that weights and states are read from
        raise
    except OSError as error:
        limit = limit_cure(error)
        free = f"Give a directory that can be written to, with {format_bytes(num_bytes)} free"
        problem = f"cannot take {what}: {error.strerror or error}"
        raise StorageError(directory, problem, cure=f"To save, {limit}" if limit else free) from error


class ElementsInOrder:
    """The elements of an array, as many at a time as the caller wants."""

    def __init__(self, parts: Iterator[tuple[int, torch.Tensor]]) -> None:
        """``parts``: see `SavedTensor.parts`."""
        self._parts = parts
        self._rest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, numel: int) -> Iterator[torch.Tensor]:
        """Yield the next ``numel`` elements in parts, 1-D. Each is valid until the next one."""
        while numel > 0:
            if not self._rest.numel():
                _, self._rest = next(self._parts)
            part, self._rest = self._rest[:numel], self._rest[numel:]
            numel -= part.numel()
            yield part

    def end(self) -> None:
        """Finish after the last element. Raises RuntimeError if elements are left."""
        # `SavedTensor.parts` compares the array's checksum behind its last part, so the generator has to be run to its
        # end.
        if self._rest.numel() or next(self._parts, None) is not None:
            raise RuntimeError("elements are left")
