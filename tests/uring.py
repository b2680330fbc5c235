"""Whether this machine has io_uring, and the mark for tests that need it."""

from __future__ import annotations

import pytest

from swapper import BackendUnavailableError
from swapper.backends.uring.ring import Ring


def why_no_uring() -> str:
    """Return why not, in words; nothing if it works."""
    try:
        Ring(2, [0]).close()
    except BackendUnavailableError as error:
        return error.reason
    return ""


_reason = why_no_uring()
needs_uring = pytest.mark.skipif(bool(_reason), reason=f"io_uring cannot be used here: {_reason}")
