"""A package ``deepspeed`` that stands in for DeepSpeed, see `infinity.as_deepspeed`.

A folder with that package and its metadata comes first on ``sys.path``, so that ``importlib.metadata`` and
``importlib.util.find_spec`` see it as well, and processes that are started from here by ``multiprocessing``. The environment
gets what DeepSpeed's launcher leaves in it for a single process (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which
the libraries look for.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from infinity.distributed.process_groups import untold_size
from infinity.errors import LibraryError

SITE = Path(__file__).with_name("site")
"""The folder that comes first on ``sys.path``."""
_LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""Port 0: any that is free, since nobody else has to find it."""


def install() -> None:
    """Stand in for `deepspeed`. Importing `infinity.as_deepspeed` calls it; a second call changes nothing.

    Raises:
        LibraryError: the real DeepSpeed is loaded, or accelerate has already seen that there is none.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and SITE not in Path(getattr(loaded, "__file__", None) or "").parents:
        where = getattr(loaded, "__file__", None) or "somewhere"
        raise LibraryError.imported_before(f"another 'deepspeed' is loaded, from {where}", "it was imported")
    if str(SITE) in sys.path:
        return
    if loaded is None and "accelerate" in sys.modules:
        raise LibraryError.imported_before(
            "accelerate is loaded, and has seen that there is no DeepSpeed", "accelerate or transformers"
        )
    if untold_size() is None:  # or each of several would train alone, as this one says
        for name, value in _LAUNCHED.items():
            os.environ.setdefault(name, value)
    sys.path.insert(0, str(SITE))
    importlib.invalidate_caches()
