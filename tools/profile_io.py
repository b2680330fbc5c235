#!/usr/bin/env python3
"""Measures what drives do under the engine's requests, compares that with fio, and gives the settings for it.

    python tools/profile_io.py /mnt/nvme                                   # about two minutes
    python tools/profile_io.py /mnt/nvme0 /mnt/nvme1 --quick --no-fio      # several drives, striped
    python tools/profile_io.py /mnt/nvme --json io.json --png io.png --model 7B --tbw 600 --apply ds_config.json

Ctrl-C ends it at any time, with a report of what was measured by then. The test files have no names, so that nothing
is left in the directories, whatever ends the program. It writes for about a minute as fast as it can, and says how much.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> int:
    """Returns the exit code: 0, 1 if a drive failed, 2 after bad input or without the packages, 130 after Ctrl-C."""
    # While the libraries are loaded there is nothing to report yet: Ctrl-C just ends it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from io_profile.program import run
    except ModuleNotFoundError as error:
        root = Path(__file__).resolve().parent.parent
        print(
            f"profile_io.py: this Python ({sys.executable}) has no module {error.name!r}. Install the project into it:\n"
            f"    {sys.executable} -m pip install -e '{root}[plot,uring]' -c {root / 'constraints.txt'}",
            file=sys.stderr,
        )
        return 2

    return run(sys.argv[1:], __doc__)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # whoever read the output has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
