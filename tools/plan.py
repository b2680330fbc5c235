#!/usr/bin/env python3
"""Says whether a model trains, and how fast, on 1 to 512 GPUs: `infinity plan`, from a checkout; --help says what there is.

python tools/plan.py --params 70b --scale --ram 1.5TB --drive-speed 25GB --gpu 80GB --tflops 300 --network 100GB
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # as it starts itself: Ctrl-C has its one line from the first moment
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infinity", "plan", *sys.argv[1:]])
