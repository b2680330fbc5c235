"""Files that ``torch.save`` wrote, read without running anything of what they name.

[Note: foreign pickles] A pickle names classes and functions, and unpickling calls them. Torch's restricted unpickler calls
only what it was given for a name. For DeepSpeed's own classes it is given records here, which take any arguments and do
nothing, so neither DeepSpeed nor anything else is imported. Tensors are views of the mapped file: their memory is the page
cache, which the system takes back when it needs it.
"""

from __future__ import annotations

import codecs
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from infinity.checkpoint.deepspeed.contents import COPY_ALL
from infinity.errors import CheckpointError

_OWN = "deepspeed."
_BLOCK_BYTES = 8 << 20
_NUMPY: dict[str, Any] = {
    **{f"{package}.multiarray._reconstruct": np.array(0).__reduce__()[0] for package in ("numpy.core", "numpy._core")},
    **{f"{package}.multiarray.scalar": np.float64(0).__reduce__()[0] for package in ("numpy.core", "numpy._core")},
    **{f"numpy.dtypes.{type(np.dtype(code)).__name__}": type(np.dtype(code)) for code in np.typecodes["All"]},
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": codecs.encode,
}
"""Arrays and numbers of numpy are data: name in pickles -> what makes them."""


class Record:
    """Stands for an object of a class that is not imported; what the object held are its attributes."""

    arguments: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any) -> Record:
        made = super().__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        """Whatever the class would have been called with."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


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
        names = sorted(get_unsafe_globals_in_checkpoint(str(path)))
    except Exception as error:  # torch raises several kinds
        raise _damaged(path, error) from error
    unknown = [name for name in names if not name.startswith(_OWN) and name not in _NUMPY]
    if unknown and not skips_unknown:
        raise CheckpointError(
            path,
            f"it holds objects of {', '.join(unknown)}, and no class of others is run for it",
            cure="Leave out what such objects are part of: --skip-unknown (skips_unknown=True)",
        )
    records = [
        (type(name.rpartition(".")[2], (Record,), {}), name)
        for name in names
        if name.startswith(_OWN) or name in unknown
    ]
    allowed: list[Any] = [*records, *((value, name) for name, value in _NUMPY.items())]
    try:
        with safe_globals(allowed):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, TypeError, KeyError, EOFError, pickle.UnpicklingError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())[:300]
    return CheckpointError(
        path,
        f"torch cannot read it: {reason}",
        cure="Copy the file again; one that an older torch wrote without a zip archive has to be saved anew",
    )


def check(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Read the whole file and compare the checksums in it.

    Args:
        path: of the file.
        progress: told of bytes that have been read.

    Raises:
        CheckpointError: it is not what was written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as file:
                    while data := file.read(_BLOCK_BYTES):
                        progress(len(data))
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
        raise CheckpointError(path, f"it is damaged: {error}", cure="Copy the file again") from error


def without_records(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The entries that hold no `Record` anywhere, and the names of the others."""
    kept = {name: value for name, value in values.items() if not _has_record(value)}
    return kept, [name for name in values if name not in kept]


def _has_record(value: Any) -> bool:
    if isinstance(value, Record) or (isinstance(value, type) and issubclass(value, Record)):
        return True
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        inner = value
    return any(_has_record(each) for each in inner)
