"""The drive alone: what fio reaches in the same directory with reads and writes mixed in our proportion."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from infinity.bench.cgroup import Cgroup

_COMMON = ("--name=mix", "--direct=1", "--bs=1M", "--ioengine=libaio", "--iodepth=32", "--output-format=json")
# Enters the control group whose file comes first, then becomes the command after it.
_INSIDE = ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"')


@dataclass(frozen=True)
class DriveSample:
    """Bytes per second that one fio run reached."""

    read_bytes_per_second: float
    write_bytes_per_second: float

    @property
    def total_bytes_per_second(self) -> float:
        """Reads and writes together."""
        return self.read_bytes_per_second + self.write_bytes_per_second


class Drive:
    """A test file in `directory`, removed on exit. Written once at first: the first write to a block is slower.

    With `bytes_per_second`, samples are taken in a control group that holds reads and writes, each, to that.
    """

    def __init__(
        self,
        directory: Path,
        *,
        bytes_per_second: int | None = None,
        num_bytes: int = 2 << 30,
        run_seconds: int = 5,
    ) -> None:
        self._path = directory / "fio.bin"
        self._num_bytes = num_bytes
        self._run_seconds = run_seconds
        self._group: Cgroup | None = None
        try:
            self._run("--rw=write", "--end_fsync=1")
            if bytes_per_second is not None:
                self._group = Cgroup("fio", ("blkio",))
                self._group.throttle(directory, bytes_per_second)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def is_available() -> bool:
        """Whether fio is installed."""
        return shutil.which("fio") is not None

    def sample(self, read_share: float) -> DriveSample:
        """Runs fio for a few seconds; `read_share` of the bytes are reads."""
        mix = f"--rwmixread={round(100 * read_share)}"
        job = self._run("--rw=rw", mix, "--time_based", f"--runtime={self._run_seconds}", "--overwrite=1")
        return DriveSample(float(job["read"]["bw_bytes"]), float(job["write"]["bw_bytes"]))

    def _run(self, *options: str) -> dict[str, dict[str, float]]:
        inside = () if self._group is None else (*_INSIDE, str(self._group.task_files[0]))
        command = [*inside, "fio", f"--filename={self._path}", f"--size={self._num_bytes}", *_COMMON, *options]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise RuntimeError(f"fio failed ({answer.returncode}): {answer.stderr.strip() or answer.stdout.strip()}")
        job: dict[str, dict[str, float]] = json.loads(answer.stdout[answer.stdout.index("{") :])["jobs"][0]
        return job

    def close(self) -> None:
        """Removes the test file and the control group."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._path.unlink, missing_ok=True)
            if self._group is not None:
                self._group.close()

    def __enter__(self) -> Drive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
