"""What Python code other threads run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from infinity.threads.frames import frames, is_alive, is_in, position

pytestmark = pytest.mark.deep


def test_whether_a_function_runs_in_a_thread() -> None:
    inside: SimpleQueue[int] = SimpleQueue()
    leave = threading.Event()

    def function() -> None:
        inside.put(threading.get_ident())
        leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function)
        other = inside.get()
        assert is_in(other, function.__code__)
        assert not is_in(threading.get_ident(), function.__code__)
        assert is_alive(other)
        assert position(other) is not None
        leave.set()
        running.result(60)
        assert not is_in(other, function.__code__)
    assert not is_alive(-5)
    assert position(-5) is None
    assert not is_in(-5, function.__code__)


def test_a_function_that_iterates_over_a_generator_is_not_left() -> None:
    begun, leave = threading.Event(), threading.Event()

    def function() -> None:
        begun.set()
        while not leave.is_set():
            sum(number for number in range(1000))

    thread = threading.Thread(target=function)
    interval = sys.getswitchinterval()
    thread.start()
    begun.wait()
    sys.setswitchinterval(1e-6)
    try:
        assert all(is_in(thread.ident or 0, function.__code__) for _ in range(5000))
    finally:
        sys.setswitchinterval(interval)
        leave.set()
        thread.join()


def test_garbage_is_collected_again_where_it_was() -> None:
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            assert threading.get_ident() in frames()
            assert gc.isenabled() == collects
        finally:
            gc.enable()


_LOOKS_WHILE_THREADS_BEGIN = """
import gc, threading, time
from infinity.threads.frames import frames

def let_others_run(phase, info):  # as a finalizer may
    if threading.current_thread() is looking:
        time.sleep(0.001)

def begin_and_end():
    while looking.is_alive():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def look():
    for _ in range(500):
        frames()

looking = threading.Thread(target=look)
gc.freeze()
gc.callbacks.append(let_others_run)
gc.set_threshold(1)
looking.start()
begin_and_end()
"""


@pytest.mark.deep
def test_a_finalizer_that_lets_others_run_holds_up_no_thread_that_begins() -> None:
    subprocess.run([sys.executable, "-c", _LOOKS_WHILE_THREADS_BEGIN], check=True, timeout=300)
