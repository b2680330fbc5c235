"""A package ``deepspeed`` that stands in for DeepSpeed, see `infinity.as_deepspeed`. Names: `infinity.deepspeed.contents`.

A folder with that package and its metadata comes first on ``sys.path``. So ``importlib.metadata``,
``importlib.util.find_spec`` and processes of ``multiprocessing`` find it as well. The environment gets the variables
that DeepSpeed's launcher sets for a single process, which libraries read.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from infinity.distributed.process_groups import untold_size
from infinity.errors import LibraryError

SITE = Path(__file__).with_name("site")
"""The folder that comes first on ``sys.path``."""
_LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@functools.cache
def _free_port() -> str:
    """Keep a port free for this process, or for a torchrun that it starts. The socket never listens, so either can.

    LlamaFactory and ms-swift pass MASTER_PORT to torchrun, whose processes look for each other there: never at port 0.
    """
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("", 0))
    port = kept.getsockname()[1]
    kept.detach()  # stays open until the process ends
    return str(port)


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
    # accelerate looks for DeepSpeed once, when it is imported.
    if loaded is None and "accelerate" in sys.modules:
        raise LibraryError.imported_before(
            "accelerate is loaded, and has seen that there is no DeepSpeed", "accelerate or transformers"
        )
    # Not if a launcher with other variables has started several processes: with WORLD_SIZE=1 each would train alone.
    if untold_size() is None:
        for name, value in _LAUNCHED.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", _free_port())
    sys.path.insert(0, str(SITE))
    importlib.invalidate_caches()


# ----------------------------------------------------------------------------- python -m infinity.as_deepspeed train.py ...

_USAGE = "usage: python -m infinity.as_deepspeed (SCRIPT | -m MODULE) [ARGUMENT ...]"

_LAUNCHER = (
    "Options of DeepSpeed's launcher are not accepted here: `torchrun --nproc-per-node 2 -m infinity.as_deepspeed "
    "SCRIPT` starts two processes"
)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:  # not if an import in a parent package fails: its own error is more precise
        return not f"{module}.".startswith(f"{error.name}.")


def run(words: Sequence[str]) -> None:
    """Run a script or module with arguments, as ``python SCRIPT ...`` and ``python -m MODULE ...`` do.

    Processes that it starts have the stand-in, too (``PYTHONPATH``).

    Raises:
        SystemExit: there is no such script or module.
    """
    is_module = words[:1] == ["-m"]
    rest = list(words[1:] if is_module else words)
    if not rest:
        raise SystemExit(_USAGE)
    if rest[0].startswith("-"):
        raise SystemExit(f"'{rest[0]}' comes before the script. {_LAUNCHER}\n{_USAGE}")
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *others])
    sys.argv[:] = rest
    if not (_is_there(rest[0]) if is_module else Path(rest[0]).exists()):
        raise SystemExit(f"there is no {'module' if is_module else 'file'} '{rest[0]}': correct its name\n{_USAGE}")
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        # As `python SCRIPT` does; behind the stand-in, which stays first.
        sys.path.insert(1, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")
