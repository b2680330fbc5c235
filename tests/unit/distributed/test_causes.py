"""The error of the rank that failed first is printed, even if the launcher ends the process meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from infinity.distributed.causes import Causes


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


def test_a_rank_that_ended_of_anothers_end_is_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said so between the question to the store and the look at its process."""
    store = torch.distributed.HashStore()
    causes = Causes(store, "ranks", 0)

    def find_ended(members: Any = None) -> str:
        store.set("ranks/cause", "rank 2 failed")
        return "the process of rank 1 has ended"

    monkeypatch.setattr(causes, "find_ended", find_ended)
    assert causes.first() == "rank 2 failed"
