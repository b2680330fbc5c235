#!/usr/bin/env python3
"""Measures the training step: `infinity bench step`, from a checkout; --help says what there is.

python tools/bench_step.py --nvme-path /mnt/nvme --throttle 300,600,1200,none
python tools/bench_step.py --throttle 600 --peer deepspeed --peer-python /path/to/venv/bin/python
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # as it starts itself: Ctrl-C has its one line from the first moment
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infinity", "bench", "step", *sys.argv[1:]])
