"""Files that ``torch.save`` wrote, read as data: nothing in them is run, and no memory is needed for tensors.

[Note: foreign pickles] torch's own reader for untrusted files (``weights_only=True``) makes numbers, texts, containers and
tensors. Under a `FakeTensorMode` it reads no tensor, but says where in the file each of them is. So tensors are views of a
mapping that may be larger than memory, which ``torch.load(mmap=True)`` refuses. Objects of other classes become a `Record`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from infinity.torch_internals.operations import replaced


class DamagedPickleError(Exception):
    """A file is not what ``torch.save`` writes; the message is the reason."""


class UnknownObjectsError(DamagedPickleError):
    """A file holds objects of classes that the caller does not know."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"it holds objects of {', '.join(names)}, and no class of others is run for it")
        self.names = names


class Record:
    """Stands for an object of a class that is not imported; a subclass without instances for the class itself.

    Attributes:
        arguments: what it was to be called with.
        state: what the object held, by name of the attribute.
    """

    arguments: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *arguments: Any) -> Record:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.state.update(part or {})


def read_pickle(path: Path, data: npt.NDArray[np.uint8], is_known: Callable[[str], bool]) -> Any:
    """What a file holds, see [Note: foreign pickles]. Tensors are views of ``data``; those of torch before 1.6 are in memory.

    Args:
        path: of the file.
        data: its bytes, mapped.
        is_known: whether objects of a class of that name may be in it.

    Raises:
        DamagedPickleError: it is not what ``torch.save`` writes, or holds objects of other classes; it names them.
        OSError: the file cannot be opened.
    """
    try:
        if not zipfile.is_zipfile(path):
            return torch.load(path, map_location="cpu", weights_only=True)
        names = get_unsafe_globals_in_checkpoint(str(path))
        unknown = sorted(name for name in names if not is_known(name))
        if unknown:
            raise UnknownObjectsError(unknown)
        return _mapped(path, data, names)
    except (OSError, DamagedPickleError):
        raise
    except Exception as error:  # of torch, zip archives and pickles, which raise many kinds
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DamagedPickleError(reason) from error


def _mapped(path: Path, data: npt.NDArray[np.uint8], names: list[str]) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with safe_globals([(type("Record", (Record,), {}), name) for name in names]), FakeTensorMode():
        found = torch.load(path, map_location="cpu", weights_only=True)
    storages: dict[int, torch.Tensor] = {}
    tensors: dict[int, torch.Tensor] = {}

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in tensors:
            storage: Any = leaf.untyped_storage()
            if not leaf.numel():
                tensors[id(leaf)] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
                return tensors[id(leaf)]
            start = storage._checkpoint_offset
            if start not in storages:
                storages[start] = torch.from_numpy(data[start : start + storage.nbytes()])
            flat = storages[start].view(leaf.dtype)
            tensors[id(leaf)] = flat.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return tensors[id(leaf)]

    return replaced(found, value_of)
