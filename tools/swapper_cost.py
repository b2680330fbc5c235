"""Measures what the swapper adds to its backend: CPU time per request, side by side.

    python tools/swapper_cost.py --directory /dev/shm
    python tools/swapper_cost.py --directory /dev/shm --backend uring --bytes 4096
    python tools/swapper_cost.py --directory /dev/shm --bytes 4096 --together 64

Both do the same in turns: reads and writes of one size, a few at a time, the next one as soon as one is over. Once they go
straight to the backend, once through a swapper. A line gives the medians of all rounds. ``--together``: so many requests are
one operation of the swapper; the backend has them one by one.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from swapper import AlignedRegion, Direction, Swapper, SwapperConfig  # noqa: E402
from swapper.backend import IORequest  # noqa: E402

# A buffer is free again when its transfer is over, so there are never more in flight than buffers.
Start = Callable[[int, Callable[[], None]], None]
"""Starts a transfer of one of the buffers; calls the function when it is over."""


def cpu_seconds(start: Start, num_requests: int, num_buffers: int) -> float:
    """CPU time of the process for so many requests, one per buffer at a time."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(num_buffers):
        free.put(index)
    # CPU time of all threads: those of the backend count on both sides.
    began = time.process_time()
    for _ in range(num_requests):
        index = free.get()
        start(index, lambda index=index: free.put(index))  # type: ignore[misc]
    # All buffers are free: every transfer is over.
    for _ in range(num_buffers):
        free.get()
    return time.process_time() - began


def measure(options: argparse.Namespace, request_bytes: int) -> None:
    """Print a line for each direction."""
    backend, together, num_buffers = options.backend, options.together, options.inflight
    # Small requests take less time, so more of them are needed for the clock.
    num_requests = 4000 if request_bytes < 1 << 16 else 400
    config = SwapperConfig(backend=backend, request_bytes=request_bytes)
    num_bytes = request_bytes * together
    with Swapper.open(options.directory, num_bytes * num_buffers, config) as opened:
        memory = AlignedRegion(num_bytes * num_buffers)
        # As the engine does with its staging memory. Both sides use the same buffers.
        forget = opened.register_memory(memory)
        whole = memory.array()
        extent = opened.allocate(whole.size, "x")
        # Written once, so that reads are not reads of a hole.
        opened.write(extent, whole).wait()
        buffers = [whole[index * num_bytes : (index + 1) * num_bytes] for index in range(num_buffers)]
        addresses = [buffer.__array_interface__["data"][0] for buffer in buffers]

        def alone(direction: Direction) -> Start:
            submit = opened.backend.submit

            def start(index: int, then: Callable[[], None]) -> None:
                # `next(left)` counts from 1 - together upwards and is 0 at the last request: 0 is false, and so `then`
                # is called. Example with 3 together: -2, -1, 0.
                first, address, left = index * num_bytes, addresses[index], itertools.count(1 - together)
                for low in range(0, num_bytes, request_bytes):
                    view = buffers[index][low : low + request_bytes].data
                    submit(IORequest(direction, first + low, view, address + low, lambda *_: next(left) or then()))

            return start

        def through(direction: Direction) -> Start:
            move = opened.read if direction is Direction.READ else opened.write

            def start(index: int, then: Callable[[], None]) -> None:
                handle = move(extent, buffers[index], offset=index * num_bytes)
                handle.add_done_callback(lambda _: then())

            return start

        for direction in Direction:
            found: dict[str, list[float]] = {"alone": [], "through": []}
            for number in range(options.rounds + 1):
                # In turns, so that a change of the machine's load meets both.
                for name, way in (("alone", alone), ("through", through)):
                    seconds = cpu_seconds(way(direction), num_requests // together, num_buffers)
                    if number:  # the first round warms up
                        found[name].append(seconds / (num_requests // together * together) * 1e6)
            one, other = (statistics.median(found[name]) for name in ("alone", "through"))
            print(
                f"{backend:8} {direction.name.lower():5} {together} x {request_bytes:8} bytes: backend alone {one:7.1f} us, "
                f"swapper {other:7.1f} us, {other / one:.2f} times"
            )
        forget()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=tempfile.gettempdir())
    parser.add_argument("--backend", default="threads", choices=["threads", "uring", "aiofiles"])
    parser.add_argument("--bytes", type=int, nargs="+", default=[4096, 1 << 20])
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--inflight", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for request_bytes in options.bytes:
        measure(options, request_bytes)


if __name__ == "__main__":
    main()
