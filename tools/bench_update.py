#!/usr/bin/env python3
"""Measures updates alone: `infinity bench update`, from a checkout; --help says what there is.

python tools/bench_update.py --workers 1,2,4 --parameters 200e6 --turns 9
"""

from __future__ import annotations

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "update", *sys.argv[1:]]))
