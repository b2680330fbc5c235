"""Files of ``torch.save``, looked at without memory for them.

Knows how torch (2.13) reads its zip files over a storage; must not know what is in them.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from infinity.torch_internals.foreign_writes import plain_storage


def load_over(file: Path, data: torch.Tensor) -> Any:
    """What ``torch.load(file, mmap=True, weights_only=True)`` gives, with all tensors over ``data``.

    torch itself sets memory aside for a mapping, so the kernel refuses a file that is larger than memory. What torch wrote
    before 1.6 is no zip file: its tensors are in memory.

    Args:
        file: as ``torch.save`` writes it.
        data: 1-D, uint8: the bytes of the file.

    Raises:
        Exception: whatever torch says of a file that it cannot load.
    """
    module: Any = torch.serialization
    if not (zipfile.is_zipfile(file) and hasattr(module, "_open_zipfile_reader") and hasattr(module, "_load")):
        return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    unpickler: Any = torch._weights_only_unpickler
    with module._open_zipfile_reader(str(file)) as reader:
        return module._load(reader, "cpu", unpickler, overall_storage=plain_storage(data), encoding="utf-8")
