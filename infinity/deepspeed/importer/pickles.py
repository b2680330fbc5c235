"""DeepSpeed's files, read as data: see [Note: foreign pickles] in ``infinity.torch_internals.pickles``.

No class is imported, neither DeepSpeed's nor anybody else's. Tensors are views of the mapped file: their memory is the page
cache, which the system takes back when it needs it.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.arrays import ArraySpec
from infinity.errors import CheckpointError
from infinity.metrics.progress import Note, silent
from infinity.torch_internals.pickles import DamagedPickleError, Record, UnknownObjectsError, read_pickle
from swapper.volumes.mapped import map_file

COPY_ALL = "Copy the whole checkpoint, the files of all ranks"
OF_ONE_SAVE = "Take the files of all ranks from one and the same save_checkpoint"
ONLY_WEIGHTS = "Load the weights alone, with infinity.load_pretrained"
ONE_STATE_DICT = "Save the weights with DeepSpeed's own tools as one state dict, and load that"
OF_DEEPSPEED = "Give a checkpoint that DeepSpeed wrote"
"""Cures."""
_OWN = "deepspeed."
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class FoundTensor:
    """One tensor.

    Attributes:
        spec: as it is to be saved; the pieces may have another dtype, all of whose values this one has.
        pieces: mapped 1-D tensors which, one after the other, are its elements in C order.
    """

    spec: ArraySpec
    pieces: Sequence[torch.Tensor]

    @classmethod
    def whole(cls, group: str, fqn: str, kind: str, value: torch.Tensor) -> FoundTensor:
        """One that lies in one piece."""
        return cls(ArraySpec.of(group, fqn, kind, value.shape, value.dtype), [value.reshape(-1)])


def read(path: Path, *, skips_unknown: bool = False) -> Any:
    """What the file holds; tensors are mapped, and `Record` stands for DeepSpeed's objects.

    Args:
        path: of the file.
        skips_unknown: whether `Record` may stand for other classes as well.

    Raises:
        CheckpointError: it is truncated, no such file, or names classes that are not DeepSpeed's.
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
        note: told of bytes that have been read.

    Raises:
        CheckpointError: it is not what was written.
    """
    try:
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
    """The entries that hold no `Record` anywhere, and the names of the others."""
    kept = {name: value for name, value in values.items() if not _has_record(value)}
    return kept, [name for name in values if name not in kept]


def _has_record(value: Any) -> bool:
    if isinstance(value, Record):
        return True
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    return any(_has_record(each) for each in inner)
