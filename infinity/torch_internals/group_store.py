"""What the default process group was made with: its store and its timeout. Known in torch 2.4 to 2.13."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def default_store(distributed: Any) -> Any:
    """The store in which its ranks have found each other, of the module ``torch.distributed``.

    None where torch has it under another name, and nothing can be told to others.
    """
    read = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if read is None else read()


def group_timeout(distributed: Any) -> timedelta | None:
    """How long its ranks wait for each other, as the script has said; None where it has not, or where torch does not tell.

    A group of nccl's own timeout, which is shorter than that of other groups, is one of which nothing was said.
    """
    group = distributed.group.WORLD
    for device in sorted(getattr(group, "_device_types", ()), key=lambda device: device.type != "cpu"):
        try:
            found: timedelta = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
        of_nccl = getattr(distributed.distributed_c10d, "default_pg_nccl_timeout", None)
        return None if device.type != "cpu" and found == of_nccl else found
    return None
