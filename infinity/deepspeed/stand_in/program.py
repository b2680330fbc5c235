"""``python -m infinity.as_deepspeed train.py ...`` or ``-m package.module ...``: run it with this stand-in for DeepSpeed.

Processes that it starts have the stand-in, too (``PYTHONPATH``).
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from infinity.deepspeed.stand_in import SITE

_USAGE = "usage: python -m infinity.as_deepspeed (SCRIPT | -m MODULE) [ARGUMENT ...]"

_LAUNCHER = (
    "Options of DeepSpeed's launcher are none here: `torchrun --nproc-per-node 2 -m infinity.as_deepspeed SCRIPT` starts two "
    "processes"
)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:  # what a package above it imports may be missing as well: let that be told
        return not f"{module}.".startswith(f"{error.name}.")


def run(words: Sequence[str]) -> None:
    """Run the script or module that the first words name, with the others as its arguments.

    Raises:
        SystemExit: there is none.
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
        sys.path.insert(1, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")
