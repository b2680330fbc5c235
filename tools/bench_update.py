#!/usr/bin/env python3
"""Measures updates alone: `infinity bench update`, from a checkout; --help says what there is.

python tools/bench_update.py --workers 1,2,4 --parameters 200e6 --turns 9
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # as it starts itself: Ctrl-C has its one line from the first moment
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infinity", "bench", "update", *sys.argv[1:]])
