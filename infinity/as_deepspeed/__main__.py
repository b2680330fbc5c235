"""``python -m infinity.as_deepspeed train.py ...`` or ``-m package.module ...``: run it with `infinity` as its DeepSpeed.

Processes that it starts have the stand-in, too (``PYTHONPATH``).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from infinity.as_deepspeed import SITE

_USAGE = "usage: python -m infinity.as_deepspeed (SCRIPT | -m MODULE) [ARGUMENT ...]"


def run(words: Sequence[str]) -> None:
    """Run the script or module that the first words name, with the others as its arguments.

    Raises:
        SystemExit: there is none.
    """
    is_module = words[:1] == ["-m"]
    rest = list(words[1:] if is_module else words)
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *others])
    sys.argv[:] = rest
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(1, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
