"""The swapper against a plain array of bytes, under thousands of random operations with faults injected, on every backend.

Operations are only started; what they must have done is decided later, when their outcomes are known, by replaying them
one after the other in the order of their submission: the swapper promises the same as if nothing overlapped.
"""

from __future__ import annotations

import contextlib
import errno
import random
import tempfile
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from swapper import (
    ALIGNMENT,
    AlignedRegion,
    ChecksumMismatchError,
    Extent,
    ExtentError,
    Handle,
    OutOfSpaceError,
    Priority,
    Swapper,
    SwapperConfig,
    SwapperError,
    TransferError,
    Volume,
)
from swapper.backend import Direction, IOBackend
from swapper.backends import AiofilesBackend, IntegrityBackend, MemoryBackend, ThreadsBackend, UringBackend
from tests.exactness.faulty_drives import JitteringBackend
from tests.faults import FaultInjectingBackend, FaultRule
from tests.uring import needs_uring

_CAPACITY = 48 * ALIGNMENT
_NUM_RETRIES = 4
_LEAST_OPERATIONS = 2000
_UNWRITTEN, _WRITTEN, _BROKEN = range(3)


@dataclass
class _Operation:
    """One read or write as it was started."""

    is_read: bool
    offset: int
    memory: np.ndarray
    content: np.ndarray
    handle: Handle | None
    refusal: SwapperError | None


# What a swapper must get over without anybody noticing.
_DISTURBANCES = (
    FaultRule(errno=errno.EAGAIN, times=1),
    FaultRule(errno=errno.EINTR, times=1),
    FaultRule(short_bytes=0, times=1),
    FaultRule(short_bytes=100, times=1),
    FaultRule(short_bytes=ALIGNMENT, times=1),
    FaultRule(delay_seconds=0.002, times=3),
)


def _failure(dice: random.Random) -> FaultRule:
    return FaultRule(
        direction=dice.choice([None, *Direction]),
        nth=dice.randint(1, 8),
        errno=dice.choice([errno.EIO, errno.ENOSPC, errno.ENODEV]),
    )


def _damage(dice: random.Random) -> FaultRule:
    return FaultRule(
        direction=dice.choice(list(Direction)), nth=dice.randint(1, 8), flipped_bit=dice.randrange(1 << 17)
    )


def _error_of(handle: Handle) -> SwapperError | None:
    # Not handle.error: to read that counts as having seen the error.
    return handle.failure


class _ModelExtent:
    """What one extent should hold, replayed up to ``history``."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.content = np.zeros(extent.num_bytes, dtype=np.uint8)
        self.state = np.full(extent.num_bytes, _UNWRITTEN, dtype=np.uint8)
        self.history: list[_Operation] = []

    def replay(self, block_bytes: int, may_fail: bool, may_be_damaged: bool) -> None:
        for operation in self.history:
            start, stop = operation.offset, operation.offset + operation.memory.size
            error = operation.refusal or (_error_of(operation.handle) if operation.handle else None)
            if operation.is_read:
                if may_be_damaged and isinstance(error, ChecksumMismatchError):
                    continue  # until all of the damaged bytes are written again
                self._check_read(operation, error, start, stop, may_fail)
            elif error is None:
                self.content[start:stop] = operation.content
                self.state[start:stop] = _WRITTEN
            else:
                assert isinstance(error, TransferError) and may_fail, error
                low = start // block_bytes * block_bytes
                high = min(-(-stop // block_bytes) * block_bytes, self.content.size)
                # Bytes beside the write that nobody has written stay unwritten, whatever happened to them.
                torn = self.state[low:high]
                torn[torn == _WRITTEN] = _BROKEN
                self.state[start:stop] = _BROKEN
        self.history.clear()

    def _check_read(
        self, operation: _Operation, error: SwapperError | None, start: int, stop: int, may_fail: bool
    ) -> None:
        state = self.state[start:stop]
        if isinstance(error, ExtentError):
            expected = _UNWRITTEN if "never written" in str(error) else _BROKEN
            assert (state == expected).any(), error
        elif error is not None:
            assert isinstance(error, TransferError) and may_fail, error
        else:
            assert (state == _WRITTEN).all(), f"read {(state != _WRITTEN).sum()} bytes that cannot be known"
            assert np.array_equal(operation.memory, self.content[start:stop]), f"stale or wrong bytes at {start}"


class SwapperMachine(RuleBasedStateMachine):
    """Starts requests, waits for some, makes some fail, and compares everything in the end."""

    num_operations: ClassVar[int] = 0
    has_damage: ClassVar[bool] = False

    def make_backend(self) -> IOBackend:
        """Return what moves the bytes."""
        raise NotImplementedError

    def wrap(self, faulty: IOBackend) -> IOBackend:
        """Return what the swapper is given: faults happen below it."""
        return faulty

    @initialize(
        request_blocks=st.sampled_from([1, 2, 3, 4, 16]),
        max_inflight=st.integers(1, 8),
        slow=st.sampled_from([None, Direction.READ, Direction.WRITE]),
    )
    def open(self, request_blocks: int, max_inflight: int, slow: Direction | None) -> None:
        inner = self.make_backend()
        self.block_bytes = inner.block_bytes
        # One direction slower than the other: requests that run in the wrong order then overtake each other.
        self.rules = [] if slow is None else [FaultRule(direction=slow, delay_seconds=0.001)]
        self.backend = FaultInjectingBackend(inner, self.rules)
        config = SwapperConfig(
            request_bytes=request_blocks * ALIGNMENT,
            max_inflight=max_inflight,
            max_retries=_NUM_RETRIES,
            max_overtakes=3,
            deadline_seconds=30.0,
        )
        self.swapper = Swapper(self.wrap(self.backend), config)
        self.extents: list[_ModelExtent] = []
        self.handles: list[Handle] = []
        self.seen: list[SwapperError] = []
        self.may_fail = self.may_be_damaged = False
        self.counter = 0
        for _ in range(3):
            self.allocate(5 * ALIGNMENT + 100, True)

    # ------------------------------------------------------------------------------------------------- operations

    @rule(num_bytes=st.integers(1, 9 * ALIGNMENT), is_filled=st.sampled_from([True, True, False]))
    def allocate(self, num_bytes: int, is_filled: bool) -> None:
        try:
            extent = self.swapper.allocate(num_bytes, f"extent {self.counter}")
        except OutOfSpaceError as error:
            assert error.largest_free_bytes < num_bytes
            return
        self.counter += 1
        model = _ModelExtent(extent)
        self.extents.append(model)
        if is_filled:  # otherwise most reads would meet bytes that nobody has written
            self._start(model, False, 0, extent.num_bytes, 0, Priority.WRITE_BACK)

    @precondition(lambda self: self.extents)
    @rule(index=st.integers(0, 99))
    def free(self, index: int) -> None:
        model = self.extents[index % len(self.extents)]
        free_bytes = self.swapper.free_bytes
        self.swapper.free(model.extent)
        assert self.swapper.free_bytes == free_bytes + model.extent.num_bytes
        model.replay(self.block_bytes, self.may_fail, self.may_be_damaged)
        self.extents.remove(model)

    @precondition(lambda self: self.extents)
    @rule(
        num_operations=st.sampled_from([2, 8, 24, 48]),
        seed=st.integers(0, 1 << 16),
        fault=st.sampled_from([None, "disturbance", "failure", "failure", "damage"]),
    )
    def start(self, num_operations: int, seed: int, fault: str | None) -> None:
        """Start some at once: drawn from a seed, because hypothesis takes long to draw as many numbers one by one."""
        dice = random.Random(seed)
        if fault == "damage" and self.has_damage:
            self._inject(_damage(dice))
            self.may_be_damaged = True
        elif fault is not None:
            self._inject(_failure(dice) if fault == "failure" else dice.choice(_DISTURBANCES))
            self.may_fail = self.may_fail or fault == "failure"
        for _ in range(num_operations):
            model = dice.choice(self.extents)
            unit = dice.choice([1, 64, ALIGNMENT])
            offset, stop = sorted(unit * dice.randint(0, model.extent.num_bytes // unit) for _ in range(2))
            is_read, priority = dice.random() < 0.5, dice.choice(list(Priority))
            # The buffer may begin anywhere in a page of memory, and be of any length, like the range in the extent.
            shift = dice.choice([0, 0, 1, 512, dice.randrange(ALIGNMENT)])
            self._start(model, is_read, offset, stop, shift, priority)

    def _start(
        self, model: _ModelExtent, is_read: bool, offset: int, stop: int, shift: int, priority: Priority
    ) -> None:
        memory = AlignedRegion(max(1, stop - offset) + shift).array()[shift : shift + stop - offset]
        self.counter += 1
        type(self).num_operations += 1
        if not is_read:
            memory[:] = np.random.default_rng(self.counter).integers(0, 256, memory.size, dtype=np.uint8)
        handle, refusal = self._try(is_read, model.extent, memory, offset, priority)
        model.history.append(_Operation(is_read, offset, memory, memory.copy(), handle, refusal))
        if handle is not None:
            self.handles.append(handle)

    def _try(
        self, is_read: bool, extent: Extent, memory: np.ndarray, offset: int, priority: Priority
    ) -> tuple[Handle | None, SwapperError | None]:
        call = self.swapper.read if is_read else self.swapper.write
        while True:
            try:
                return call(extent, memory, offset=offset, priority=priority), None
            except SwapperError as error:
                if not self._was_pending(error):
                    return None, error

    def _was_pending(self, error: SwapperError) -> bool:
        """Whether an error is that of an earlier request, raised because nobody had waited for it."""
        if not any(_error_of(handle) is error for handle in self.handles):
            return False
        assert not any(error is seen for seen in self.seen), "an error came twice"
        self.seen.append(error)
        return True

    # How many handles there are depends on timing (a read of broken bytes is refused at once if their write is over),
    # and what hypothesis draws must not: hence an index and not a choice from a list.
    @rule(index=st.integers(1, 99))
    def wait(self, index: int) -> None:
        if not self.handles:
            return
        handle = self.handles[-index % len(self.handles)]
        try:
            handle.wait()
        except SwapperError as error:
            assert error is handle.error
            self.seen.append(error)
        assert handle.done()

    @rule(index=st.integers(1, 99), priority=st.sampled_from(Priority))
    def promote(self, index: int, priority: Priority) -> None:
        if self.handles:
            self.handles[-index % len(self.handles)].promote(priority)

    # ----------------------------------------------------------------------------------------------------- faults

    def _inject(self, fault: FaultRule) -> None:
        # Only one at a time: several disturbances of one transfer would add up to more than max_retries.
        self.backend.clear()
        for each in (fault, *self.rules):
            self.backend.add(each)

    @rule()
    def stop_failing(self) -> None:
        self.backend.clear()
        for each in self.rules:
            self.backend.add(each)
        self._settle()
        self.may_fail = False

    @rule()
    def flush(self) -> None:
        self._flush()
        for handle in self.handles:
            assert handle.is_read or handle.done()

    # ---------------------------------------------------------------------------------------------------- the end

    def _flush(self) -> None:
        while True:
            try:
                self.swapper.flush()
                return
            except SwapperError as error:
                assert self._was_pending(error), error

    def _settle(self) -> None:
        """Wait for everything; every failure must have been seen exactly once before somebody asks for it."""
        for handle in self.handles:
            while not handle.done():
                try:
                    handle.wait()
                except SwapperError as error:
                    self.seen.append(error)
        self._flush()
        for handle in self.handles:
            error = _error_of(handle)
            assert error is None or any(error is seen for seen in self.seen), f"an error was lost: {error}"
        self.swapper.raise_pending()
        for model in self.extents:
            model.replay(self.block_bytes, self.may_fail, self.may_be_damaged)
        self.handles.clear()
        self.seen.clear()
        statistics = self.swapper.statistics()
        assert statistics.inflight == statistics.queued == 0

    def teardown(self) -> None:
        if hasattr(self, "swapper"):
            try:
                self._settle()
            finally:
                self.swapper.close()


class _Threads(SwapperMachine):
    def make_backend(self) -> IOBackend:
        with tempfile.TemporaryDirectory() as directory:
            return ThreadsBackend(Volume([directory], _CAPACITY), num_threads=3)


def _striped_volume(direct: bool) -> Volume:
    with contextlib.ExitStack() as stack:
        directories = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        return Volume(directories, _CAPACITY, stripe_bytes=2 * ALIGNMENT, direct=direct)


class _ThreadsStriped(SwapperMachine):
    def make_backend(self) -> IOBackend:
        return ThreadsBackend(_striped_volume(direct=False), num_threads=2)


class _Uring(SwapperMachine):
    def make_backend(self) -> IOBackend:
        with tempfile.TemporaryDirectory() as directory:
            return UringBackend(Volume([directory], _CAPACITY), 8)


class _UringStriped(SwapperMachine):
    def make_backend(self) -> IOBackend:
        return UringBackend(_striped_volume(direct=True), 3)


class _Aiofiles(SwapperMachine):
    def make_backend(self) -> IOBackend:
        with tempfile.TemporaryDirectory() as directory:
            return AiofilesBackend(Volume([directory], _CAPACITY, direct=False), num_threads=2)


class _Memory(SwapperMachine):
    def make_backend(self) -> IOBackend:
        return MemoryBackend(_CAPACITY, num_threads=2)


class _Integrity(_Threads):
    """Checksums over direct files, where requests in one page end in any order. None may ever differ."""

    def make_backend(self) -> IOBackend:
        return JitteringBackend(super().make_backend(), seed=0, longest_seconds=0.002)

    def wrap(self, faulty: IOBackend) -> IOBackend:
        return IntegrityBackend(faulty)


class _IntegrityWithDamage(_Memory):
    """Bits flip on the way to and from the drive: no wrong byte may get through."""

    has_damage = True

    def wrap(self, faulty: IOBackend) -> IOBackend:
        return IntegrityBackend(faulty, page_bytes=4 * ALIGNMENT)


_MACHINES = [
    _Threads,
    _ThreadsStriped,
    pytest.param(_Uring, marks=needs_uring),
    pytest.param(_UringStriped, marks=needs_uring),
    _Aiofiles,
    _Memory,
    _Integrity,
    _IntegrityWithDamage,
]
_SETTINGS = settings(
    max_examples=8,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=False,  # or the second round would be the first again
)


@pytest.mark.deep(but=2)
@pytest.mark.timeout(600)  # hypothesis may take 5 minutes to find the shortest way to a failure
@pytest.mark.parametrize("machine", _MACHINES, ids=lambda machine: machine.__name__.lstrip("_"))
def test_the_swapper_does_what_plain_bytes_do(machine: type[SwapperMachine]) -> None:
    machine.num_operations = 0
    while machine.num_operations < _LEAST_OPERATIONS:  # how many there are in a round is up to hypothesis
        run_state_machine_as_test(machine, settings=_SETTINGS)
