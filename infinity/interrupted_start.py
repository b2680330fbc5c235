"""Sets what has to be set before a command imports its libraries.

Ctrl-C meanwhile ends it at once and says nothing, as it ends `cat`. `infinity train` gets OpenMP threads that sleep while they
wait: those that spin hold up each other on a busy machine.

Imported before all else, so it also says that there is no Linux; must not import anything that takes time. Elsewhere than in a
command, Ctrl-C stays what it is.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

if sys.platform != "linux":
    raise ImportError(
        f"infinity needs Linux, and this is {sys.platform}. Use a Linux machine, a container, or WSL 2 on Windows"
    )

_COMMAND = "infinity"


def _is_command() -> bool:
    """Whether this process is ``python -m infinity`` or pip's script of that name."""
    first, given = (sys.argv or [""])[0], sys.orig_argv
    if first == "-m":  # as long as Python looks for the module
        return given[given.index("-m") + 1 :][:1] == [_COMMAND] if "-m" in given else False
    return os.path.basename(first) == _COMMAND


def _exchange(present: object, new: object) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is present:
        signal.signal(signal.SIGINT, new)  # type: ignore[arg-type]


def over() -> None:
    """From now on the command handles `KeyboardInterrupt` itself."""
    _exchange(signal.SIG_DFL, signal.default_int_handler)


if _is_command():
    _exchange(signal.default_int_handler, signal.SIG_DFL)
    if sys.argv[1:2] == ["train"]:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # OpenMP reads it once, when torch is imported
