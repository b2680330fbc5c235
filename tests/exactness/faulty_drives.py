"""Puts a backend that does wrong what it is told between every engine and its drives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

import swapper.swapper
from swapper.backend import IOBackend, IORequest
from swapper.backends import BackendWrapper
from tests.faults import DelayLine, FaultInjectingBackend


@contextmanager
def wrapped_drives(wrap: Callable[[IOBackend], IOBackend]) -> Iterator[None]:
    """Every volume that is opened inside the ``with`` block is seen through ``wrap``."""
    real = swapper.swapper.open_backend
    with mock.patch.object(swapper.swapper, "open_backend", lambda *args, **kwargs: wrap(real(*args, **kwargs))):
        yield


@contextmanager
def faulty_drives() -> Iterator[list[FaultInjectingBackend]]:
    """As :func:`wrapped_drives`; gives the backends, so that a test can tell them what to do wrong, and when."""
    backends: list[FaultInjectingBackend] = []

    def wrap(inner: IOBackend) -> IOBackend:
        backends.append(FaultInjectingBackend(inner))
        return backends[-1]

    with wrapped_drives(wrap):
        yield backends


_Error = TypeVar("_Error", bound=BaseException)


def cause_of(error: BaseException, kind: type[_Error]) -> _Error:
    """The first error of this kind among an error and its causes."""
    link: BaseException | None = error
    while not isinstance(link, kind):
        assert link is not None, f"no {kind.__name__} behind {error!r}"
        link = link.__cause__ or link.__context__
    return link


class JitteringBackend(BackendWrapper):
    """Delays each request by a random time of its own, so that they end in an order nobody planned for.

    Args:
        inner: does the work.
        seed: the same one gives the same delays for the same order of requests.
        longest_seconds: the upper bound of a delay.
    """

    def __init__(self, inner: IOBackend, seed: int, longest_seconds: float) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._longest_seconds = longest_seconds
        self._delays = DelayLine()

    def submit(self, request: IORequest) -> None:
        delay = self._random.choice((0.0, self._random.random() * self._longest_seconds))
        self._delays.call_later(delay, lambda: self.inner.submit(request))

    def close(self, timeout_seconds: float) -> bool:
        self._delays.close()
        return self.inner.close(timeout_seconds)
