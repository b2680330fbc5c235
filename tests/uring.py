"""Whether this machine has io_uring, and the mark for tests that need it."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import pytest

from swapper import BackendUnavailableError, Swapper, SwapperConfig


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
