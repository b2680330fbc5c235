"""DeepSpeed's files, read as data: see [Note: foreign pickles] in ``infinity.torch_internals.pickles``.

No class is imported. Tensors are views of the mapped file, in the page cache, which the system can drop.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.arrays import ArraySpec
from infinity.errors import CheckpointError
from infinity.metrics.progress import Note, silent
from infinity.torch_internals.pickles import DamagedPickleError, Record, UnknownObjectsError, read_pickle
from swapper.volumes.mapped_memory import map_file

COPY_ALL = "Copy the whole checkpoint, the files of all ranks"
OF_ONE_SAVE = "Take the files of all ranks from the same save_checkpoint call"
ONLY_WEIGHTS = "Load the weights alone, with infinity.load_pretrained"
ONE_STATE_DICT = "Save the weights with DeepSpeed's own tools as one state dict, and load that"
OF_DEEPSPEED = "Give a checkpoint that DeepSpeed wrote"
"""Cures."""
_OWN = "deepspeed."
_BLOCK_BYTES = 8 << 20  # read at a time for checksums


@dataclass(frozen=True)
class FoundTensor:
    """One tensor.

    Attributes:
        spec: of the array to be written. Pieces may have a narrower dtype.
        pieces: mapped 1-D tensors that follow each other in C order.
    """

    spec: ArraySpec
    pieces: Sequence[torch.Tensor]

    @classmethod
    def whole(cls, group: str, fqn: str, kind: str, value: torch.Tensor) -> FoundTensor:
        """A tensor in one piece."""
        return cls(ArraySpec.of(group, fqn, kind, value.shape, value.dtype), [value.reshape(-1)])


def read(path: Path, *, skips_unknown: bool = False) -> Any:
    """The contents of a file. Tensors are mapped, and a `Record` is in place of each object of DeepSpeed's.

    Args:
        path: of the file.
        skips_unknown: whether a `Record` may replace objects of other classes as well.

    Raises:
        CheckpointError: the file is missing or truncated, or has objects of classes that are not DeepSpeed's.
    """
    if not path.is_file():
        raise CheckpointError(path, "it is missing", cure=COPY_ALL)
    try:
        return read_pickle(path, map_file(path), lambda name: skips_unknown or name.startswith(_OWN))
    except UnknownObjectsError as error:
        cure = "Leave out what such objects are part of: --skip-unknown (skips_unknown=True)"
        raise CheckpointError(path, str(error), cure=cure) from error
    except (DamagedPickleError, OSError) as error:
        raise CheckpointError(path, f"it cannot be read: {error}", cure="Copy the file again") from error


def check(path: Path, note: Note = silent) -> None:
    """Read the whole file and compare the checksums in it.

    Args:
        path: of the file.
        note: gets the number of bytes that were read since its last call.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        # torch.save writes a zip file, in which each member has a crc32. Reading a member to its end compares it.
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"{member.filename!r} is compressed, as torch.save never does")
                with archive.open(member) as file:
                    while data := file.read(_BLOCK_BYTES):
                        note(len(data))
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(path, f"it is damaged: {error}", cure="Copy the file again") from error


def without_records(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The entries without a `Record` anywhere in them, and the names of the others."""
    kept = {name: value for name, value in values.items() if not _has_record(value)}
    return kept, [name for name in values if name not in kept]


def _has_record(value: Any) -> bool:
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    is_container = isinstance(inner, list | tuple | set | frozenset)
    return isinstance(value, Record) or (is_container and any(map(_has_record, inner)))
