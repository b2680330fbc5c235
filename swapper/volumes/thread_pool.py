"""Threads for work on files that also has to be done while the interpreter ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class ThreadPool(ThreadPoolExecutor):
    """Python's own, but work that it takes no more, because the interpreter ends, is done by who brings it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do ``fn(*args, **kwargs)``, at once if no thread can be had."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            future: Future[Any] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future


__all__ = ["ThreadPool"]
