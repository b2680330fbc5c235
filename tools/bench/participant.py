"""The parent's side of a measured process: starts it in its control group, orders turns, collects what they took."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cgroup import Cgroup
from bench.measured.models import Workload

_LOG_LINES = 25
"""Lines of a failed process's output that are shown."""
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
"""For all participants alike: torch asks for huge pages, without which a CPU spends much of a step in page faults."""
_MEASURED = Path(__file__).resolve().parent / "measured"
OURS = Path(__file__).resolve().parents[2]
# Takes that folder for a package of its own: a peer's environment has not what importing `infinity` needs, and a peer's
# memory is measured without it.
_START = (
    "import importlib.util as u, sys; place = sys.argv.pop(1); "
    "spec = u.spec_from_file_location('measured', f'{place}/__init__.py', submodule_search_locations=[place]); "
    "sys.modules['measured'] = u.module_from_spec(spec); from measured.child import main; main()"
)
# io_uring registers memory, which counts as locked.
_LAUNCH = 'ulimit -l unlimited 2>/dev/null; exec "$@"'


class ParticipantFailed(RuntimeError):
    """A measured process stopped; the message holds its reason and the end of its log."""


@dataclass(frozen=True)
class ParticipantSpec:
    """Which program, in which environment, under which limits."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    path: str | None = None
    """Folder whose packages come before those of the environment; None: ours, where it is our own."""
    memory_limit_bytes: int | None = None


class Participant:
    """A running measured process. Steps only when told to; idle otherwise, so several can take turns."""

    def __init__(
        self,
        spec: ParticipantSpec,
        workload: Workload,
        directory: Path,
        *,
        controllers: Sequence[str],
        bytes_per_second: int | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self.spec = spec
        self.turns: list[dict[str, Any]] = []
        self.peak_bytes: int | None = None
        self.steady_peak_bytes: int | None = None
        # False for version 2 before Linux 6.12: then there is no steady peak.
        self._resets_peak = True
        # If anything fails, all that was made is undone in reverse. At the end `pop_all` keeps it for `__exit__`.
        with contextlib.ExitStack() as resources:
            scratch = tempfile.TemporaryDirectory(prefix=f"{spec.name}_", dir=directory, ignore_cleanup_errors=True)
            resources.enter_context(scratch)
            # stderr of the process: a file, because nobody reads a pipe while it computes.
            self._log = resources.enter_context(tempfile.TemporaryFile("w+", dir=directory))
            self._group = resources.enter_context(Cgroup(spec.name, tuple(controllers)))
            self._memory = self._group.memory
            if self._memory is not None and spec.memory_limit_bytes is not None:
                self._memory.limit(spec.memory_limit_bytes)
            if controllers and bytes_per_second is not None:
                self._group.throttle(directory, bytes_per_second)
            self._process = self._start(workload, scratch.name)
            resources.callback(self._end)
            if limit_seconds is not None:
                # Killed by a thread: this one is blocked in `readline`, which then returns nothing.
                timer = threading.Timer(limit_seconds, self._kill)
                timer.start()
                resources.callback(timer.cancel)
            # Waits until the model is built.
            self.ready = self._answer()
            self._resources = resources.pop_all()

    def _start(self, workload: Workload, scratch: str) -> subprocess.Popen[str]:
        environment = (
            ENVIRONMENT
            | os.environ
            | {
                # The environment's own tools (ninja for one) come first.
                "PATH": f"{Path(self.spec.python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
                # A peer must not find our libraries instead of its own.
                # Example: for our own kind it is this checkout, for a peer's interpreter it is empty.
                "PYTHONPATH": self.spec.path or (str(OURS) if self.spec.python == sys.executable else ""),
                # Models are made from a config: nothing is downloaded.
                "HF_HUB_OFFLINE": "1",
            }
        )
        settings = self.spec.settings | {"directory": scratch, "parent_pid": os.getpid()}
        arguments = [self.spec.kind, json.dumps(asdict(workload)), json.dumps(settings)]
        program = [self.spec.python, "-c", _START, str(_MEASURED), *arguments]
        return subprocess.Popen(
            self._group.command("/bin/sh", "-c", _LAUNCH, "sh", *program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            # Ctrl-C is for the benchmark alone, which ends its children in order.
            start_new_session=True,
        )

    def run_turn(self, num_steps: int, *, counts: bool) -> dict[str, Any]:
        """Orders `num_steps` steps and waits for them. Turns that do not count are warm-up."""
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps({"num_steps": num_steps}) + "\n")
            self._process.stdin.flush()
        turn = self._answer()
        if self._memory is not None and self._memory.has_peak:
            self.peak_bytes = max(self.peak_bytes or 0, self._memory.peak_bytes)
            # The peak of warm-up includes building the model: `steady_peak_bytes` begins after it.
            if not counts:
                self._resets_peak = self._memory.reset_peak()
            elif self._resets_peak:
                self.steady_peak_bytes = self._memory.peak_bytes
        if counts:
            self.turns.append(turn)
        return turn

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        # An empty line is the end of the pipe: the process has died.
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._how_it_ended()}
        if "error" in answer:
            self._log.seek(0)
            end = "\n".join(self._log.read().splitlines()[-_LOG_LINES:])
            raise ParticipantFailed(f"{self.spec.name}: {answer['error']}\n{end}")
        return answer

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        # SIGKILL alone does not tell who sent it. The group counts kills of its memory limit.
        if self._memory is not None and self._memory.num_out_of_memory_kills:
            limit = self.spec.memory_limit_bytes or 0
            return f"killed by the kernel: it needs more than its memory limit of {limit / 1e9:.2f} GB"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Participant:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()
