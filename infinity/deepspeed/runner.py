"""``python -m deepspeed.launcher.runner`` runs this: `infinity launch`, with the same PYTHONPATH."""

import os
import sys

if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-m", "infinity", "launch", *sys.argv[1:]])
