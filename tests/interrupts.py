"""KeyboardInterrupts at chosen points of a program: wherever the interpreter may deliver a signal, and nowhere else.

CPython looks for signals when a function begins, after a call, and when a loop jumps back. An interrupt after a call
belongs to the call: whatever handles the call's own exceptions handles it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

Point = tuple[CodeType, int]
"""A code object and the offset of an instruction in it; -1 stands for its beginning."""
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})


@functools.cache
def _offsets(code: CodeType) -> frozenset[int]:
    """Of the instructions before which an interrupt may come."""
    found: set[int] = set()
    bytecode = dis.Bytecode(code)

    def handler(offset: int) -> int:
        return next((e.target for e in bytecode.exception_entries if e.start <= offset < e.end), -1)

    before: dis.Instruction | None = None
    for instruction in bytecode:
        is_after_call = before is not None and before.opname in _CALLS
        if before is not None and is_after_call and handler(before.offset) == handler(instruction.offset):
            found.add(instruction.offset)
        if "JUMP_BACKWARD" in instruction.opname and handler(instruction.offset) == handler(instruction.argval):
            found.add(instruction.argval)
        before = instruction
    return frozenset(found)


class Interrupt:
    """Inside the ``with`` block the first pass of a point raises a KeyboardInterrupt.

    Attributes:
        points: all that were passed, in the order of their first passes.
        where: where it was raised, in words; empty if it was not.
    """

    def __init__(self, is_chosen: Callable[[CodeType], bool], at: Point | None = None) -> None:
        """
        Args:
            is_chosen: whether an interrupt may come in some code; asked once for each.
            at: where it comes; None for nowhere.
        """
        self.points: dict[Point, None] = {}
        self.where = ""
        self._is_chosen = functools.cache(is_chosen)
        self._at = at
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _begin(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not self._is_chosen(code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if not code.co_flags & inspect.CO_GENERATOR:  # these also begin again, to be ended
            self._pass(frame, -1)
        return self._go_on

    def _go_on(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _offsets(frame.f_code):
            self._pass(frame, frame.f_lasti)
        return self._go_on

    def _pass(self, frame: FrameType, offset: int) -> None:
        point = frame.f_code, offset
        self.points[point] = None
        if point == self._at:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
            sys.settrace(self._before)
            raise KeyboardInterrupt


class Visit(Interrupt):
    """Inside the ``with`` block the first pass of a point calls a function, as a signal handler would be called there.

    Attributes:
        error: what the function raised.
    """

    def __init__(
        self, is_chosen: Callable[[CodeType], bool], at: Point | None, function: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(is_chosen, at)
        self._function = function
        self.error: Exception | None = None

    def _pass(self, frame: FrameType, offset: int) -> None:
        point = frame.f_code, offset
        self.points[point] = None
        if point == self._at and not self.where:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
            sys.settrace(None)
            try:
                self._function()
            except Exception as error:
                self.error = error
            sys.settrace(self._begin)


def is_cut_off(function: Callable[[], object], interrupt: Interrupt) -> bool:
    """Call ``function``, inside of which ``interrupt`` is active; return whether it came. Raises if it got lost."""
    try:
        function()
    except KeyboardInterrupt:
        return True
    if interrupt.where:
        raise AssertionError(f"the interrupt in {interrupt.where} was lost")
    return False


def some_of(points: Iterable[Point], most: int) -> list[Point]:
    """At most so many of them, from everywhere. Which, depends little on whether a few more were passed than last time."""

    def place(point: Point) -> int:
        code, offset = point
        return zlib.crc32(f"{Path(code.co_filename).name} {code.co_qualname} {offset}".encode())

    return sorted(points, key=place)[:most]
