"""What ``python -m deepspeed.launcher.runner`` runs: `infinity launch`, whose processes find the stand-in in PYTHONPATH, too."""

import os
import sys

if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-m", "infinity", "launch", *sys.argv[1:]])
