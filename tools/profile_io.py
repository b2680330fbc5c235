#!/usr/bin/env python3
"""Measures what drives do under the engine's requests, compares that with fio, and gives the settings for it.

python tools/profile_io.py /mnt/nvme takes about two minutes; --help says what else there is.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def main() -> int:
    """Returns the exit code: 0, 1 if a drive failed, 2 after bad input or without the packages, 130 after Ctrl-C."""
    # While the libraries are loaded there is nothing to report yet: Ctrl-C just ends it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from infinity.cli.main import main as run

        return run(["profile", *sys.argv[1:]])
    except ModuleNotFoundError as error:
        root = Path(__file__).resolve().parent.parent
        print(
            f"profile_io.py: this Python ({sys.executable}) has no module {error.name!r}. Install the project into it:\n"
            f"    {sys.executable} -m pip install -e '{root}[plot,uring]' -c {root / 'constraints.txt'}",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
