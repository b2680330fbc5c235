"""What ``infinity launch`` has torchrun start: a script, as Python would run it, and word for torchrun of the error that ends it.

torchrun then names, at the end of its output, the process that failed first, and its traceback, also of one that comes to no
`infinity.initialize`. Imports neither this package nor torch: the script is the first to do so, and its error may be that it
cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path


def main() -> None:
    """Run the script that the first argument names, with the others as its own."""
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        told = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
        with contextlib.suppress(KeyError, OSError):  # what torchrun reads, in the form that it has
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))
        raise


if __name__ == "__main__":
    main()
