"""The store in which the ranks of the default process group have found each other. Known in torch 2.4 to 2.13."""

from __future__ import annotations

from typing import Any


def default_store(distributed: Any) -> Any:
    """It, of the module ``torch.distributed``; None where torch has it under another name, and nothing can be told to others."""
    read = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if read is None else read()
