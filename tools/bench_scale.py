#!/usr/bin/env python3
"""Finds the largest model that trains within a memory limit: `infinity bench scale`, from a checkout; --help says what there is.

python tools/bench_scale.py --limit 4GiB --nvme-path /mnt/nvme --png scale.png
python tools/bench_scale.py --limit 1GiB --model 100m
"""

from __future__ import annotations

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "scale", *sys.argv[1:]]))
