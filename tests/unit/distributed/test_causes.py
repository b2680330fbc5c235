"""The error of the rank that failed first is printed, even if the launcher ends the process meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.deep
def test_a_launcher_that_comes_while_the_error_is_printed_does_not_silence_it() -> None:
    """torch's hook has taken sys.stderr away then, until the traceback is complete: all that is written is lost."""
    code = """
        import io, os, signal, sys, torch
        from infinity.distributed.causes import Causes
        def hook(*_):
            kept, sys.stderr = sys.stderr, io.StringIO()
            print("told", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGTERM)
            print(sys.stderr.getvalue(), file=kept)
        sys.excepthook = hook
        Causes(torch.distributed.HashStore(), "ranks", 0, 1).listen()
        raise OSError("the drive")
    """
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a run"}
    command = [sys.executable, "-c", "if 1:" + code]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (-signal.SIGTERM, "told")
