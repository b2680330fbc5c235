"""Whether this machine has io_uring, the mark for tests that need it, and what its rings are given."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import pytest

from swapper import BackendUnavailableError, Swapper, SwapperConfig
from swapper.backends.uring.ring import Ring


def why_no_uring() -> str:
    """Return why not, in words; nothing if it works."""
    try:
        with TemporaryDirectory() as directory:
            Swapper.open([directory], 4096, SwapperConfig(backend="uring")).close()
    except BackendUnavailableError as error:
        return error.reason
    return ""


_reason = why_no_uring()
needs_uring = pytest.mark.skipif(bool(_reason), reason=f"io_uring cannot be used here: {_reason}")


def fixed_transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slot of each transfer of registered memory that a ring gets from now on."""
    real, slots = Ring.prepare, list[int]()

    def prepare(ring: Ring, *arguments: int) -> bool:
        if arguments[-1] >= 0:
            slots.append(arguments[-1])
        return real(ring, *arguments)

    monkeypatch.setattr(Ring, "prepare", prepare)
    return slots
