"""fio on the same files: what the kernel's own interfaces reach without us."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinity.io_profile.grid import READ_SHARE, Point, size_words
from swapper.measure.io_setting import Workload

MISSING = (
    "fio is not installed, so there is nothing to compare with; install it (apt-get install fio, dnf install fio) or pass "
    "--no-fio to have this line go away"
)
START_SECONDS = 0.28
"""About what fio takes besides the time it measures; it counts for the time left only."""
_PATIENCE_SECONDS = 60.0
_WORDS = {Workload.READ: "read", Workload.WRITE: "write", Workload.MIXED: "rw"}


class FioFailed(RuntimeError):
    """fio cannot do this here; the message is what it said."""


ENGINES = {
    "psync": ("--ioengine=psync",),
    "libaio": ("--ioengine=libaio",),
    "io_uring": ("--ioengine=io_uring",),
    # With buffers and files registered, which is often faster; memlock may forbid it.
    "io_uring registered": ("--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"),
}
"""Ways of fio's to do I/O, in its own words."""
_WAITING = "psync"
"""The engine that has one request under way in each process."""


@dataclass(frozen=True)
class FioJob:
    """How fio makes its requests: `depth` in flight in `num_jobs` processes together. A waiting engine has no more of
    them in flight than it has processes."""

    engine: str
    request_bytes: int
    num_jobs: int
    depth: int

    @property
    def point(self) -> Point:
        """Where it is compared with ours."""
        return Point(self.request_bytes, self.depth)

    def words(self) -> str:
        """For tables: `libaio, 1 job, 1 MiB x 8`."""
        jobs = f"{self.num_jobs} job{'s' if self.num_jobs > 1 else ''}"
        return f"{self.engine}, {jobs}, {size_words(self.request_bytes)} x {self.depth}"


@dataclass(frozen=True)
class FioSample:
    """What one run of fio says of itself: bytes per second without its start, and processor cores."""

    job: FioJob
    workload: Workload
    read_bytes_per_second: float
    write_bytes_per_second: float
    written_bytes: int
    cpu_cores: float

    @property
    def bytes_per_second(self) -> float:
        """Both directions together."""
        return self.read_bytes_per_second + self.write_bytes_per_second


def job_at(engine: str, point: Point, *, num_files: int, num_cores: int) -> FioJob:
    """The job of an engine that is compared with ours at a point, with no more processes than cores.

    Every file has a process of its own if there are cores enough, so that a slow drive does not hold up a fast one; an
    engine that waits for each request gets all the processes there may be.
    """
    if engine != _WAITING:
        num_jobs = num_files if num_files <= num_cores else 1
    else:
        num_jobs = min(point.depth, num_cores)
        num_jobs -= num_jobs % num_files if num_jobs >= num_files else 0
    return FioJob(engine, point.request_bytes, num_jobs, point.depth)


def version(executable: str) -> str:
    """As fio says it."""
    answer = subprocess.run([executable, "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "unknown version"


class Fio:
    """Runs fio on files that have no name, by the paths under /proc that lead to them.

    Args:
        executable: path of the program.
        paths: the files.
        is_direct: whether the files' file system takes O_DIRECT.
        huge_pages: whether fio's buffers lie in huge pages, as ours do. It has no option for it: glibc is told.
    """

    def __init__(self, executable: str, paths: Sequence[str], *, is_direct: bool, huge_pages: bool = False) -> None:
        self._executable = executable
        self._sizes = {path: os.stat(path).st_size for path in paths}
        self._is_direct = is_direct
        self._environment = os.environ | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {})
        self._position = 0.0  # where the next run begins, as a part of each file

    def use_part(self, part: float) -> None:
        """Keep to the first part (0 to 1) of every file: what lies behind was never written, and costs nothing to read."""
        self._sizes = {path: int(part * num_bytes) // 4096 * 4096 for path, num_bytes in self._sizes.items()}

    @property
    def num_files(self) -> int:
        """Files that it works on."""
        return len(self._sizes)

    def measure(self, job: FioJob, workload: Workload, seconds: float) -> FioSample:
        """One run.

        Raises:
            FioFailed: with fio's own words.
        """
        output = self._run(self._command(job, workload, seconds), seconds)
        results = _parse(output)
        read, write = results["read"], results["write"]
        self._advance(int(read["io_bytes"]) + int(write["io_bytes"]))
        return FioSample(
            job,
            workload,
            float(read["bw_bytes"]),
            float(write["bw_bytes"]),
            int(write["io_bytes"]),
            (float(results["usr_cpu"]) + float(results["sys_cpu"])) / 100 * job.num_jobs,
        )

    def _command(self, job: FioJob, workload: Workload, seconds: float) -> list[str]:
        command = [
            self._executable,
            f"--bs={job.request_bytes}",
            *ENGINES[job.engine],
            f"--iodepth={max(1, job.depth // job.num_jobs) if job.engine != _WAITING else 1}",
            f"--rw={_WORDS[workload]}",
            f"--rwmixread={round(100 * READ_SHARE)}",
            f"--direct={int(self._is_direct)}",
            f"--end_fsync={int(not self._is_direct)}",
            "--overwrite=1",
            "--time_based",
            f"--runtime={max(1, round(1000 * seconds))}ms",
            "--group_reporting",
            "--clocksource=clock_gettime",
            "--eta=never",
            "--output-format=json",
        ]
        if job.num_jobs < self.num_files:
            return [*command, "--name=all", f"--filename={':'.join(self._sizes)}", f"--numjobs={job.num_jobs}"]
        jobs_per_file = job.num_jobs // self.num_files
        for number, (path, num_bytes) in enumerate(self._sizes.items()):
            # Like ours it goes on where the run before ended, so that it does not find its bytes in some cache on the
            # way; several jobs share the rest of the file.
            start = int(self._position * num_bytes) // job.request_bytes * job.request_bytes
            part = (num_bytes - start) // jobs_per_file // job.request_bytes * job.request_bytes
            command += [
                f"--name=file{number}",
                f"--filename={path}",
                f"--offset={start}",
                f"--size={part}",
                f"--numjobs={jobs_per_file}",
                f"--offset_increment={part if jobs_per_file > 1 else 0}",
            ]
        return command

    def _run(self, command: list[str], seconds: float) -> str:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env=self._environment,
            # Ctrl-C is for us; what fio does then would count as a result.
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=seconds + _PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise FioFailed(f"no answer after {seconds + _PATIENCE_SECONDS:.0f} s") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode != 0:
            raise FioFailed(_first_words(stderr + stdout) or f"exit code {process.returncode}")
        return stdout

    def _advance(self, num_bytes: int) -> None:
        self._position += num_bytes / sum(self._sizes.values())
        # What is left must be long enough for a run not to go round in a small part of the file.
        if self._position > 0.5:
            self._position = 0.0


def _parse(output: str) -> dict[str, Any]:
    try:
        (job,) = json.loads(output[output.index("{") :])["jobs"]
    except (ValueError, KeyError) as error:
        raise FioFailed(f"its output cannot be read ({error}): {output[:200]!r}") from error
    if job["error"]:
        raise FioFailed(os.strerror(job["error"]))
    results: dict[str, Any] = job
    return results


def _first_words(text: str) -> str:
    """The line that says most: fio prints warnings, then the reason, then the consequences."""
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("{", '"', "}"))
    ]
    telling = [line for line in lines if re.search(r"error=|not loadable|not supported|permitted|fail|memory", line)]
    return re.sub(r"\s+", " ", (telling or lines or [""])[0])[:200]
