"""Turns of threads: one after the other, with guests and deputies, and nobody waits for who is gone."""

from __future__ import annotations

import _thread
import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.errors import ForkedError, TurnError
from infinity.threads import turn as module
from infinity.threads.frames import position
from infinity.threads.turn import Turn, guard, take_turns, trusts
from tests.waiting import wait_until

pytestmark = pytest.mark.deep


class _Rules:
    """What the test says, and what it has heard."""

    def __init__(self) -> None:
        self.admits = False
        self.is_whole = True
        self.on_wait: Callable[[], bool] = lambda: False
        self.lost_by: list[int] = []
        self.num_left = 0

    def admits_guests(self) -> bool:
        return self.admits

    def has_whole_weights(self) -> bool:
        return self.is_whole

    def is_waiting(self) -> bool:
        return self.on_wait()

    def lose_thread(self) -> None:
        self.lost_by.append(get_ident())

    def leave_to_parent(self) -> None:
        self.num_left += 1


class _Worker:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.ident: int = self.do(get_ident)

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(function, *args, **kwargs)

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.start(function, *args, **kwargs).result(60)

    def end(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def rules() -> _Rules:
    return _Rules()


@pytest.fixture
def turn(rules: _Rules) -> Iterator[Turn]:
    yield Turn(rules)
    assert not trusts(), "the test has left a turn open"


@pytest.fixture
def workers() -> Iterator[list[_Worker]]:
    made = [_Worker(f"worker {index}") for index in range(3)]
    yield made
    for worker in made:
        worker.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by looking at it: nobody has patience for more than ten looks."""
    now = iter(range(1_000_000))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 10)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.001)


def _awaited(turn: Turn, *workers: _Worker) -> None:
    wait_until(lambda: all(worker.ident in turn._waiting for worker in workers), "waiting for a turn")


# --------------------------------------------------------------------------------------------------- one after the other


def test_a_turn_is_over_when_it_was_ended_as_often_as_it_was_begun(turn: Turn, workers: list[_Worker]) -> None:
    for _ in range(2):
        assert turn.begin("a forward", reads=False) is False
    assert turn.is_mine and trusts()
    assert not workers[0].do(lambda: turn.is_mine or trusts())
    waiting = workers[0].start(turn.begin, "a step", reads=False)
    _awaited(turn, workers[0])
    assert turn._waiting
    turn.end()
    assert turn.is_mine and not waiting.done()
    turn.end()
    assert waiting.result(60) is False
    assert not turn.is_mine and not trusts() and not turn._waiting
    assert workers[0].do(lambda: turn.is_mine and trusts())
    workers[0].do(turn.end)
    assert not workers[0].do(trusts)


def test_calls_that_were_cut_off_before_they_ended_a_turn_can_be_forgotten(turn: Turn, workers: list[_Worker]) -> None:
    for _ in range(3):
        turn.begin("a step", reads=False)
    workers[0].do(turn.be_outermost)  # who has no turn changes nothing
    turn.end()
    assert turn.is_mine and trusts()
    turn.be_outermost()
    turn.end()
    assert not turn.is_mine and not trusts()


def test_a_turn_that_is_garbage_is_over(rules: _Rules) -> None:
    turn, other = Turn(rules), Turn(rules)
    for each in (turn, other):
        each.begin("a forward", reads=False)
    del turn, each
    gc.collect()
    assert trusts()
    other.end()
    assert not trusts()


def test_the_block_of_a_turn_ends_it_after_an_error_too(turn: Turn, workers: list[_Worker]) -> None:
    with pytest.raises(ZeroDivisionError), turn.taken("a step"):
        assert turn.is_mine
        raise ZeroDivisionError
    assert not turn.is_mine
    workers[0].do(turn.begin, "a step", reads=False)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside of a callback
def test_an_interrupt_leaves_no_lock_taken(turn: Turn, workers: list[_Worker]) -> None:
    draw = random.Random(0)
    before = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    num_interrupted = 0
    try:
        while num_interrupted < 300:
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, draw.uniform(2e-5, 4e-4))
                for _ in range(100_000):
                    turn.begin("a forward", reads=False)
                    turn.end()
            except KeyboardInterrupt:
                num_interrupted += 1
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            workers[0].do(turn.look_again)  # which waits for the lock
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    turn.be_outermost()
    if turn.is_mine:
        turn.end()


def test_first_come_first_served(turn: Turn, workers: list[_Worker]) -> None:
    order: list[int] = []

    def work(index: int) -> None:
        with turn.taken("a step"):
            order.append(index)

    with turn.taken("a forward"):
        futures = []
        for index in (2, 0, 1):
            futures.append(workers[index].start(work, index))
            _awaited(turn, workers[index])
    for future in futures:
        future.result(60)
    assert order == [2, 0, 1]


def test_who_reads_waits_for_another_threads_step_and_holds_nobody_up(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    with turn.taken("a backward"):
        rules.is_whole = False
    with turn.taken("reading what oneself began", reads=True):
        pass
    reading = workers[0].start(turn.begin, "reading", reads=True)
    _awaited(turn, workers[0])
    assert workers[1].do(turn.begin, "the step", reads=False) is False
    rules.is_whole = True
    assert not reading.done()
    workers[1].do(turn.end)
    assert reading.result(60) is False


def test_who_came_in_between_without_reading_waits_for_the_step_all_the_same(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    with turn.taken("a backward"):
        rules.is_whole = False
    workers[0].do(turn.begin, "a table of states", reads=False)
    workers[0].do(turn.end)
    reading = workers[0].start(turn.begin, "reading", reads=True)
    _awaited(turn, workers[0])
    assert not reading.done()
    with turn.taken("the step"):
        rules.is_whole = True
    assert reading.result(60) is False
    workers[0].do(turn.end)


# ------------------------------------------------------------------------------------------------------ guests and deputies


def test_a_guest_takes_part_and_is_waited_for_before_weights_change(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    rules.admits = True
    turn.begin("a forward", reads=False)
    guest = workers[0]
    assert guest.do(turn.begin, "an operation", reads=False, joins=True) is True
    assert guest.do(lambda: (turn.is_guest, turn.is_guest_newly, turn.is_mine, trusts())) == (True, True, False, True)
    assert guest.do(turn.begin, "a part of it", reads=False, joins=True) is True
    assert not guest.do(lambda: turn.is_guest_newly)
    assert turn.has_guests and turn.has_guest(guest.ident) and not turn.is_guest
    changing = workers[1].start(turn.be_alone)
    _awaited(turn, workers[1])
    guest.do(turn.end)
    assert not changing.done() and guest.do(trusts)
    guest.do(turn.end)
    changing.result(60)
    assert not turn.has_guests and not guest.do(trusts)
    assert turn.is_mine, "the turn itself is not over"
    turn.be_alone()
    turn.end()


def test_nobody_is_a_guest_who_does_not_ask_or_is_not_admitted(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    turn.begin("a forward", reads=False)
    joining = workers[0].start(turn.begin, "an operation", reads=False, joins=True)
    _awaited(turn, workers[0])
    rules.admits = True
    asking = workers[1].start(turn.begin, "a forward", reads=False)
    _awaited(turn, workers[1])
    turn.look_again()
    assert joining.result(60) is True
    assert not asking.done()
    workers[0].do(turn.end)
    turn.end()
    assert asking.result(60) is False


def test_what_a_deputy_does_is_done_by_who_has_the_turn(turn: Turn, workers: list[_Worker]) -> None:
    def act() -> tuple[bool, bool, bool]:
        with turn.lent():
            is_guest = turn.begin("a part", reads=False)
            turn.end()
            return is_guest, turn.is_mine, trusts()

    turn.begin("engine.train_batch()", reads=False)
    assert workers[0].do(act) == (False, True, True)
    assert not workers[0].do(lambda: turn.is_mine or trusts()), "it was lent, not given"
    assert turn.is_mine
    turn.end()
    assert not turn.is_mine


def _in_native_thread(function: Callable[[], Any]) -> list[Any]:
    """What ``function`` gives in a thread that Python's ``threading`` did not make: inside a backward, and outside one."""
    found: list[Any] = []

    def run() -> None:
        leaf = torch.ones(1, requires_grad=True)
        (leaf * 2).register_hook(lambda gradient: found.append(function()))
        product = leaf * 2
        product.register_hook(lambda gradient: found.append(function()))
        product.sum().backward()
        found.append(function())

    _thread.start_new_thread(run, ())
    wait_until(lambda: len(found) == 2, "a backward in another thread")
    return found


def test_autograds_own_threads_act_for_who_has_the_turn(turn: Turn) -> None:
    assert _in_native_thread(lambda: turn.is_mine) == [False, False]
    with turn.taken("engine.backward()"):
        assert _in_native_thread(lambda: turn.is_mine) == [True, False]


def test_a_turn_of_a_backward_that_nobody_announced_belongs_to_all_of_autograds_threads(turn: Turn) -> None:
    def begin() -> bool:
        if module.in_backward():
            turn.begin("backward", reads=False)
        return turn._owner == module._NATIVE

    assert _in_native_thread(begin) == [True, True]
    assert _in_native_thread(lambda: turn.is_mine) == [True, False]
    turn.end()
    with turn.taken("a step"):
        assert turn.is_mine


def test_who_reads_after_such_a_backward_waits_for_the_step_of_the_forwards_thread(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    with turn.taken("a forward"):
        pass
    _in_native_thread(lambda: turn.begin("backward", reads=False) if module.in_backward() else None)
    rules.is_whole = False
    turn.end()
    reading = workers[0].start(turn.begin, "reading", reads=True)
    _awaited(turn, workers[0])
    assert not reading.done()
    with turn.taken("a step"):
        rules.is_whole = True
    assert reading.result(60) is False
    workers[0].do(turn.end)


# ---------------------------------------------------------------------------------------------------------- who is gone


@pytest.mark.parametrize("is_guest", [False, True])
def test_nobody_sleeps_for_who_has_left(turn: Turn, rules: _Rules, workers: list[_Worker], is_guest: bool) -> None:
    def leave() -> None:
        turn.begin("an operation", reads=False, joins=True, inside=leave.__code__)

    def sleep(seconds: float) -> None:
        pytest.fail("nobody will wake it")

    if is_guest:
        rules.admits = True
        turn.begin("a forward", reads=False)
    workers[0].do(leave)
    turn._changed.wait = sleep  # type: ignore[assignment,method-assign]
    if is_guest:
        turn.be_alone()
    else:
        turn.begin("a step", reads=False)
    turn.end()


def test_a_turn_is_taken_from_a_thread_that_has_ended(turn: Turn, rules: _Rules, workers: list[_Worker]) -> None:
    worker = _Worker("ends")
    worker.do(turn.begin, "a forward", reads=False)
    waiting = workers[0].start(turn.begin, "a step", reads=False)
    _awaited(turn, workers[0])
    assert not rules.lost_by
    worker.end()
    assert waiting.result(60) is False
    assert rules.lost_by == [workers[0].ident]
    assert workers[0].do(lambda: turn.is_mine)


def test_a_turn_is_taken_from_a_function_that_was_left_without_ending_it(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    goes_on = threading.Event()

    def forward() -> None:
        turn.begin("a forward", reads=False, inside=forward.__code__)
        goes_on.wait(60)
        raise ZeroDivisionError

    cut_off = workers[0].start(forward)
    wait_until(lambda: turn._owner == workers[0].ident)
    waiting = workers[1].start(turn.begin, "a step", reads=False)
    _awaited(turn, workers[1])
    assert not waiting.done() and not rules.lost_by
    goes_on.set()
    with pytest.raises(ZeroDivisionError):
        cut_off.result(60)
    assert waiting.result(60) is False
    assert rules.lost_by == [workers[1].ident]
    assert not workers[0].do(trusts), "it takes part no more"
    workers[1].do(turn.end)
    with turn.taken("a step"):
        assert len(rules.lost_by) == 1


def test_a_guest_that_was_cut_off_is_not_waited_for(turn: Turn, rules: _Rules, workers: list[_Worker]) -> None:
    rules.admits = True

    def operate() -> None:
        turn.begin("an operation", reads=False, joins=True, inside=operate.__code__)
        raise ZeroDivisionError

    with turn.taken("a forward"):
        with pytest.raises(ZeroDivisionError):
            workers[0].do(operate)
        assert turn.has_guests
        turn.be_alone()
        assert not turn.has_guests and not rules.lost_by
    assert not workers[0].do(trusts)


def test_who_reads_does_not_wait_for_the_step_of_a_thread_that_has_ended(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    worker = _Worker("ends")
    worker.do(turn.begin, "a backward", reads=False)
    rules.is_whole = False
    worker.do(turn.end)
    worker.end()
    assert workers[0].do(turn.begin, "reading", reads=True) is False
    assert workers[0].do(lambda: turn.is_mine)


# ------------------------------------------------------------------------------------------------------------- patience


@pytest.mark.usefixtures("clock")
def test_who_waits_for_a_thread_that_stands_still_is_told_so(turn: Turn, workers: list[_Worker]) -> None:
    workers[0].do(turn.begin, "a forward", reads=False)
    with pytest.raises(TurnError, match=r"^a step: waited for thread 'worker 0\S*', which is in a forward and"):
        turn.begin("a step", reads=False)
    assert not turn._waiting and not turn._queue, "and is out of the others' way"
    workers[0].do(turn.end)
    with turn.taken("a step"):
        assert turn.is_mine


@pytest.mark.usefixtures("clock")
def test_a_turn_that_was_begun_once_more_is_not_taken_from_a_living_thread(
    turn: Turn, rules: _Rules, workers: list[_Worker]
) -> None:
    def leave() -> None:
        for _ in range(2):
            turn.begin("a forward", reads=False, inside=leave.__code__)

    workers[0].do(leave)
    with pytest.raises(TurnError, match="which is in a forward"):
        turn.begin("a step", reads=False)
    assert not rules.lost_by
    workers[0].do(turn.end)
    workers[0].do(turn.end)


@pytest.mark.usefixtures("clock")
def test_who_waits_for_a_guest_that_stands_still_is_told_so(turn: Turn, rules: _Rules, workers: list[_Worker]) -> None:
    rules.admits = True
    with turn.taken("a forward"):
        workers[0].do(turn.begin, "an operation", reads=False, joins=True)
        with pytest.raises(TurnError, match=r"changing weights: .* a forward of its own"):
            turn.be_alone()


@pytest.mark.usefixtures("clock")
def test_a_drive_is_waited_for_as_long_as_it_takes(turn: Turn, rules: _Rules, workers: list[_Worker]) -> None:
    workers[0].do(turn.begin, "a forward", reads=False)
    num_looks = 0

    def look() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 40:
            workers[0].start(turn.end)  # when this thread, which looks, has let it in
        return num_looks <= 40 or turn._owner is not None

    rules.on_wait = look
    assert turn.begin("a step", reads=False) is False
    assert num_looks >= 40
    turn.end()


@pytest.mark.usefixtures("clock")
def test_a_thread_whose_code_goes_on_is_waited_for(turn: Turn, rules: _Rules, workers: list[_Worker]) -> None:
    goes_on: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        turn.begin("a forward", reads=False)
        for _ in range(20):
            goes_on.get()
            goes_on.get()  # on another line: it has moved
        turn.end()

    num_looks = 0

    def look() -> bool:
        """The waiting thread looks a second time: the other one goes on."""
        nonlocal num_looks
        before = position(workers[0].ident)
        goes_on.put(None)
        num_looks += 1
        if num_looks > 40:  # it is about to end, and may have to wait for a processor
            return True
        wait_until(lambda: position(workers[0].ident) != before, "the next line")
        return False

    rules.on_wait = look
    working = workers[0].start(work)
    wait_until(lambda: turn._owner == workers[0].ident)
    assert turn.begin("a step", reads=False) is False
    turn.end()
    assert num_looks >= 40
    working.result(60)


# --------------------------------------------------------------------------------------------------------------- the rest


def test_in_a_forked_child_nobody_has_a_turn_and_none_begins(turn: Turn, rules: _Rules, workers: list[_Worker]) -> None:
    rules.admits = True
    workers[0].do(turn.begin, "a forward", reads=False)
    workers[1].do(turn.begin, "an operation", reads=False, joins=True)
    turn._forget()
    assert rules.num_left == 1
    assert not workers[0].do(lambda: turn.is_mine) and not turn.has_guests
    with pytest.raises(ForkedError, match="a step"):
        turn.begin("a step", reads=False)


def test_in_a_forked_child_a_lock_that_another_thread_had_is_not_waited_for(turn: Turn, workers: list[_Worker]) -> None:
    workers[0].do(turn._changed.acquire)
    held = turn._changed
    turn._forget()
    try:
        workers[1].do(turn.end)
    finally:
        workers[0].do(held.release)


def test_open_parameters_are_guarded_from_those_who_take_no_part(
    turn: Turn, workers: list[_Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Part, "torch_function", None)  # puts the real one back afterwards

    class Guarded(torch.Tensor):
        __torch_function__ = guard(lambda function, types, args=(), kwargs=None: "refused")

    tensor = torch.ones(1).as_subclass(Guarded)

    def operate() -> bool:
        result: Any = torch.add(tensor, 1)
        return bool(result != "refused")

    assert not operate()
    with turn.taken("a forward"):
        assert operate()
        assert not workers[0].do(operate)
    assert not operate()


def test_calls_of_an_engine_are_made_in_turn_and_wait_for_whole_weights_if_they_read() -> None:
    begun: list[tuple[str, bool]] = []
    ends: list[None] = []

    class Turns:
        def begin(self, what: str, *, reads: bool) -> None:
            begun.append((what, reads))

        def end(self) -> None:
            ends.append(None)

    def call(self: Any, value: int, *, fails: bool = False) -> int:
        assert len(begun) == len(ends) + 1
        if fails:
            raise ZeroDivisionError
        return value

    kind = type("Kind", (), {})
    for name in ("flush", "step"):
        method = type(call)(call.__code__, globals(), name, call.__defaults__, call.__closure__)
        method.__kwdefaults__ = call.__kwdefaults__
        setattr(kind, name, method)
    take_turns(kind, reading=("flush",), others=("step",))
    engine: Any = kind()
    engine._pager = SimpleNamespace(turn=Turns())
    for name in ("flush", "step"):
        assert getattr(engine, name)(3) == 3
        assert begun[-1] == (f"engine.{name}()", name == "flush")
    with pytest.raises(ZeroDivisionError):
        engine.step(1, fails=True)
    assert len(begun) == len(ends) == 3
