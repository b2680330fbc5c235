"""Makes the files that are kept here: each a small checkpoint that DeepSpeed wrote, see ``write.py``.

PYTHON_WITH_DEEPSPEED tests/deepspeed_checkpoints/pack.py [NAME ...]
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from write import KEPT

_HERE = Path(__file__).parent


def main() -> None:
    """Makes those that are named, or all."""
    for name in sys.argv[1:] or KEPT:
        with tempfile.TemporaryDirectory() as directory:
            case = json.dumps(dataclasses.asdict(KEPT[name]))
            subprocess.run([sys.executable, _HERE / "write.py", directory, case], check=True)
            with tarfile.open(_HERE / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                for path in sorted(Path(directory).rglob("*")):
                    if path.is_file() and path.suffix != ".py":  # DeepSpeed puts scripts of its own beside them
                        archive.add(path, str(path.relative_to(directory)))


if __name__ == "__main__":
    main()
