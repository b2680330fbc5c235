#!/usr/bin/env python3
"""Trains a byte-level Llama from NVMe: `infinity train`, from a checkout. The training is infinity/demo/train.py: copy that.

python tools/train.py                                                # small model, two cores, under 3 minutes
python tools/train.py --model 1b --nvme-path /mnt/nvme --text book.txt --host-memory-budget 1GB
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # as it starts itself: Ctrl-C has its one line from the first moment
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infinity", "train", *sys.argv[1:]])
