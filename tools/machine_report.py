"""Makes one file that you can send from what a machine has measured: no names, no paths, no host.

    infinity profile /mnt/nvme --json > profile.json
    python tools/bench_step.py --nvme-path /mnt/nvme --json bench.json
    python tools/machine_report.py profile.json bench.json > machine.json

Numbers are kept. Of texts, only those that name hardware, versions and settings: see `TEXTS`. Read the file before you send it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXTS = frozenset(
    {
        *("processor", "kernel", "python", "drive", "accelerator", "control groups", "deepspeed"),
        *("infinity-offload", "torch", "numpy", "numba", "transformers"),
        *("label", "name", "kind", "model", "dtype", "schedule", "backend", "io_backend", "workload"),
    }
)
"""Keys whose texts are kept."""
# What may follow an option of a command line: "300,600,none", "1.5GB". Anything else could be a path or a name.
_NUMBERS = re.compile(r"(none|[\d.,]+[kKMGT]?i?B?)(,(none|[\d.,]+[kKMGT]?i?B?))*")
# A marker of its own: None is a value that reports have.
_DROPPED = object()


def cleaned(value: Any, key: str = "") -> Any:
    """Return a value of a report without names of persons, hosts and places; `_DROPPED` if nothing is left."""
    if isinstance(value, dict):
        # Keys with a slash are paths.
        kept = {name: cleaned(each, name) for name, each in value.items() if "/" not in name}
        return {name: each for name, each in kept.items() if each is not _DROPPED}
    if isinstance(value, list):
        if key == "command":
            # Without the script's own path.
            return [word for word in value[1:] if re.fullmatch(r"--[a-z-]+", word) or _NUMBERS.fullmatch(word)]
        return [each for each in (cleaned(each, key) for each in value) if each is not _DROPPED]
    # Kept only if listed, so that a new field of a report is dropped until somebody has looked at it.
    if isinstance(value, str) and (key not in TEXTS or "/" in value):
        return _DROPPED
    return value


def report(files: Sequence[Path]) -> dict[str, Any]:
    """Return the part of these files that may be sent, in their order."""
    return {"format": 1, "reports": [cleaned(json.loads(file.read_text())) for file in files]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if a file cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written with --json")
    try:
        found = report(parser.parse_args(arguments).files)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
