"""What Python code other threads run."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from infinity.threads.frames import frames, is_alive, is_in, position


def test_whether_a_function_runs_in_a_thread() -> None:
    inside, leave = threading.Event(), threading.Event()

    def function() -> int:
        inside.set()
        leave.wait(60)
        return threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(function)
        inside.wait(60)
        other = next(thread.ident for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor"))
        assert other is not None
        assert is_in(other, function.__code__)
        assert not is_in(threading.get_ident(), function.__code__)
        assert is_alive(other)
        assert position(other) is not None
        leave.set()
        assert running.result(60) == other
        assert not is_in(other, function.__code__)
    assert not is_alive(other)
    assert position(other) is None
    assert not is_in(other, function.__code__)


def test_garbage_is_collected_again_where_it_was() -> None:
    for collects in (True, False):
        (gc.enable if collects else gc.disable)()
        try:
            assert threading.get_ident() in frames()
            assert gc.isenabled() == collects
        finally:
            gc.enable()


_LOOKS_WHILE_THREADS_BEGIN = """
import gc, sys, threading, time
from infinity.threads.frames import frames

class Garbage:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0)  # another thread may run

def begin_and_end():
    while looks.is_alive():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

def look():
    for _ in range(2000):
        Garbage()
        gc.set_threshold(1)
        kept.append(frames())  # a dictionary that was freed would be used again, and nothing collected
        gc.set_threshold(0)

kept = [{} for _ in range(200)]
gc.set_threshold(0)
looks = threading.Thread(target=look)
looks.start()
begin_and_end()
"""


def test_a_finalizer_that_lets_others_run_holds_up_no_thread_that_begins() -> None:
    subprocess.run([sys.executable, "-c", _LOOKS_WHILE_THREADS_BEGIN], check=True, timeout=60)
