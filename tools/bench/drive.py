"""The drive alone: what fio reaches in the same directory with reads and writes mixed in our proportion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fio

from bench.cgroup import Cgroup

_COMMON = ("--name=mix", "--direct=1", "--bs=1M", "--ioengine=libaio", "--iodepth=32")


@dataclass(frozen=True)
class DriveSample:
    """Bytes per second that one fio run reached."""

    read_bytes_per_second: float
    write_bytes_per_second: float

    @property
    def total_bytes_per_second(self) -> float:
        """Reads and writes together."""
        return self.read_bytes_per_second + self.write_bytes_per_second


@contextlib.contextmanager
def mixed_rate(
    directory: Path, *, bytes_per_second: int | None, num_bytes: int = 2 << 30, run_seconds: int = 5
) -> Iterator[Callable[[float], DriveSample]]:
    """Gives a function that runs fio for a few seconds; its argument is the share of the bytes that are reads.

    The test file in `directory` is written once at first: the first write to a block is slower. It is removed on exit. With
    `bytes_per_second`, samples are taken in a control group that holds reads and writes, each, to that.
    """
    path = directory / "fio.bin"

    def run(*options: str) -> dict[str, dict[str, float]]:
        (job,) = fio.run(f"--filename={path}", f"--size={num_bytes}", *_COMMON, *options, wrap=group.command)
        return job

    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        group = stack.enter_context(Cgroup("fio", () if bytes_per_second is None else ("blkio",)))
        run("--rw=write", "--end_fsync=1")
        if bytes_per_second is not None:
            group.throttle(directory, bytes_per_second)

        def sample(read_share: float) -> DriveSample:
            mix = f"--rwmixread={round(100 * read_share)}"
            job = run("--rw=rw", mix, "--time_based", f"--runtime={run_seconds}", "--overwrite=1")
            return DriveSample(float(job["read"]["bw_bytes"]), float(job["write"]["bw_bytes"]))

        yield sample
