#!/usr/bin/env python3
"""Finds the largest model that trains within a memory limit: `infinity bench scale`, from a checkout; --help says what there is.

python tools/bench_scale.py --limit 4GiB --nvme-path /mnt/nvme --png scale.png
python tools/bench_scale.py --limit 1GiB --model 100m
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # as it starts itself: Ctrl-C has its one line from the first moment
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infinity", "bench", "scale", *sys.argv[1:]])
