"""What checksums of everything that is read and written cost: processor time per gigabyte, by size of page and request.

    python tools/checksum_cost.py

Only the checksums are measured: the backend below them does nothing. So the seconds per GB are also the cores that are
busy with checksums at 1 GB/s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swapper.backend import Direction, IORequest
from swapper.backends.memory import MemoryBackend
from swapper.memory.region import AlignedRegion
from swapper.wrappers.checksum import PAGE_BYTES, is_fast
from swapper.wrappers.integrity import IntegrityBackend


class _NoBackend(MemoryBackend):
    """Moves nothing, at once."""

    def submit(self, request: IORequest) -> None:
        request.complete(len(request.memory))


def _raise(request: IORequest, transferred_bytes: int, error: OSError | None) -> None:
    if error is not None:
        raise error


def _seconds(work: Callable[[], None], num_repetitions: int) -> float:
    """Processor time of the fastest repetition: others of this machine only ever add to it."""
    best = float("inf")
    for _ in range(num_repetitions):
        started = time.thread_time()
        work()
        best = min(best, time.thread_time() - started)
    return best


def measure(num_bytes: int, page_bytes: int, request_bytes: int, num_repetitions: int) -> tuple[float, float]:
    """Return the seconds of processor time per GB, for writes and for reads."""
    memory = AlignedRegion(num_bytes).array()
    memory[:] = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    address: int = memory.__array_interface__["data"][0]
    backend = IntegrityBackend(_NoBackend(num_bytes), page_bytes)

    def run(direction: Direction) -> None:
        for start in range(0, num_bytes, request_bytes):
            piece = memory[start : start + request_bytes].data
            backend.submit(IORequest(direction, start, piece, address + start, _raise))

    write = _seconds(lambda: run(Direction.WRITE), num_repetitions)
    read = _seconds(lambda: run(Direction.READ), num_repetitions)
    backend.close(1.0)
    return write / num_bytes * 1e9, read / num_bytes * 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="how much is written and read (256)")
    parser.add_argument("--repetitions", type=int, default=5, help="of which the fastest counts (5)")
    options = parser.parse_args(arguments)
    if options.mebibytes < 4 or options.repetitions < 1:
        parser.error("at least 4 MiB and 1 repetition are needed")
    num_bytes = options.mebibytes // 4 * 4 << 20
    print(f"crc32c is computed {'by the processor' if is_fast() else 'in Python'}; {num_bytes >> 20} MiB")
    print(f"{'page':>10} {'request':>10} {'write, core s/GB':>18} {'read, core s/GB':>18} {'memory per TB':>15}")
    for page_bytes in (4 << 10, 16 << 10, PAGE_BYTES, 256 << 10, 1 << 20):
        for request_bytes in (1 << 20, 4 << 20):
            write, read = measure(num_bytes, page_bytes, request_bytes, options.repetitions)
            page, request = f"{page_bytes >> 10} KiB", f"{request_bytes >> 20} MiB"
            table_megabytes = 5 * 1e12 / page_bytes / 1e6
            used = "  <- used" if page_bytes == PAGE_BYTES else ""
            print(f"{page:>10} {request:>10} {write:>18.3f} {read:>18.3f} {table_megabytes:>12.0f} MB{used}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
