#!/usr/bin/env python3
"""Measures the I/O throughput of drives under the engine's requests. It is `infinity profile`, run from a checkout:

python tools/profile_io.py /mnt/nvme
python tools/profile_io.py /mnt/nvme0 /mnt/nvme1 --json io.json
"""

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
