"""Runs a script as Python would, on each rank of ``infinity launch``, and reports the error that ends it to torchrun.

torchrun then prints the traceback of the rank that failed first at the end of its output.
"""

from __future__ import annotations

# Imports neither infinity nor torch: the script does so first, and its error may be that it cannot.
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
    # The script sees what `python SCRIPT ARGUMENTS` would give it: its own argv, and its folder first on sys.path.
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        # The format of torch.distributed.elastic's error files. torchrun sets the variable; without it nothing is
        # written.
        more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        told = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}}
        with contextlib.suppress(KeyError, OSError):  # what torchrun reads, in the form that it has
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(told))
        # The script's exit status and its traceback on stderr stay as they are.
        raise


if __name__ == "__main__":
    main()
