#!/usr/bin/env python3
"""Says whether a model trains, and how fast: `infinity plan`, from a checkout; --help says what there is.

python tools/plan.py --params 70b --ram 64GB --disk 2TB --drive-speed 6GB --gpu 24GB --tflops 150
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # as it starts itself: Ctrl-C has its one line from the first moment
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infinity", "plan", *sys.argv[1:]])
