"""Lines between the processes of one machine: for what they tell each other, and for files that they hand over.

Knows processes; must not know what is told. A message takes no thread but those that send it and wait for it; through gloo's
connections, with threads of its own on both sides, one takes about twenty times as long (`Ranks.meet` between two processes).

A line is a socket without a name in any file system. It ends with the process, however that ends, and whoever waits at its other
end hears of it at once.
"""

from __future__ import annotations

import array
import contextlib
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta

from swapper.sync.lifetimes import Roll

_HELLO = struct.Struct("qq")
_MOST_BYTES = 1 << 15
"""Of a message, so that two of them find room in a socket and nobody waits for room while others wait for him."""
_LOOK_SECONDS, _MOST_SECONDS = 0.005, 3600.0
"""How often to do what is done meanwhile, and to look at the time."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""torch's own."""


class Lines:
    """Of this process to others of its machine, by rank. Used by one thread at a time.

    Everything raises OSError if the process at the other end has ended, or does not come in time.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        """``timeout``: how long to wait for another one; None: torch's default. Nobody is connected yet."""
        self._timeout_seconds = (timeout or _DEFAULT_TIMEOUT).total_seconds()
        self._lines: dict[int, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._secret = secrets.randbits(62)
        self._is_closed = False

    def listen(self) -> tuple[int, ...]:
        """What others need to know to reach this one: a name, and a number that they prove themselves by. Zeros: nobody can."""
        name = secrets.randbits(62), secrets.randbits(62)
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.setblocking(False)
            self._listener.bind(_address(*name))
            self._listener.listen(socket.SOMAXCONN)
        except (AttributeError, OSError):  # another system, or no more files
            if self._listener is not None:
                self._listener.close()
            self._listener = None
            return 0, 0, 0
        _open.add(self)
        return *name, self._secret

    def __iter__(self) -> Iterator[int]:
        """To whom there is one."""
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def connect(self, index: int, places: Sequence[Sequence[int]]) -> list[bool]:
        """Reach those before rank ``index``, which is this one, as far as they are on its machine. Returns which it did."""
        for rank, (first, second, secret) in enumerate(places[:index] if self._listener is not None else []):
            with contextlib.suppress(OSError):
                self._lines[rank] = _connected(_address(first, second), _HELLO.pack(secret, index))
        return [rank in self._lines for rank in range(len(places))]

    def accept(self, reached_by: Collection[int]) -> None:
        """The ranks ``reached_by`` have all reached this one; it takes them, and those that it has reached take it.

        Whom it could not take, or who did not, has no line to it afterwards.
        """
        wanted = {*reached_by}
        if self._listener is not None:
            with contextlib.suppress(OSError):  # there are no others, or no more files for them
                while wanted:
                    line, rank = _accepted(self._listener, self._secret)
                    if rank not in wanted:
                        line.close()
                        continue
                    wanted.discard(rank)
                    line.send(b"\0")
                    self._lines[rank] = line
            self._listener.close()
        for rank, line in [*self._lines.items()]:
            line.settimeout(self._timeout_seconds)
            if rank not in reached_by:
                try:
                    self.hear([rank])
                except OSError:
                    self._lines.pop(rank).close()

    def tell(self, rank: int, message: bytes, files: Sequence[int] = ()) -> None:
        """Send a message, with open files. It returns before the other one has heard it."""
        self._check_open()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        self._lines[rank].sendmsg([message], rights)

    def hear(self, ranks: Collection[int], meanwhile: Callable[[], None] | None = None) -> dict[int, bytes]:
        """The next message of each, whichever comes first. ``meanwhile``: called often until all are there."""
        self._check_open()
        waiting = select.poll()
        numbers = {self._lines[rank].fileno(): rank for rank in ranks}
        for number in numbers:
            waiting.register(number, select.POLLIN)
        found: dict[int, bytes] = {}
        deadline = time.monotonic() + self._timeout_seconds
        look_seconds = _MOST_SECONDS if meanwhile is None else _LOOK_SECONDS
        while len(found) < len(ranks):
            left = max(deadline - time.monotonic(), 0.0)
            ready = waiting.poll(1000 * min(left, look_seconds))
            self._check_open()
            for number, _ in ready:
                found[numbers[number]] = _whole(self._lines[numbers[number]].recv(_MOST_BYTES))
                waiting.unregister(number)
            if not ready and not left:
                raise TimeoutError(f"nothing came for {self._timeout_seconds:.0f} s")
            if not ready and meanwhile is not None:
                meanwhile()
        return found

    def hear_files(self, rank: int) -> tuple[bytes, list[int]]:
        """The next message of a rank, and the files that came with it: one, or none."""
        message, files, _, _ = socket.recv_fds(self._lines[rank], _MOST_BYTES, 1)
        return _whole(message), files

    def tell_all(self, message: bytes, meanwhile: Callable[[], None] | None = None) -> dict[int, bytes]:
        """All send one of the same length, and get those of the others. If lengths differ, so does what comes."""
        found = dict.fromkeys(self._lines, b"")
        for start in range(0, len(message), _MOST_BYTES):
            for rank in found:
                self.tell(rank, message[start : start + _MOST_BYTES])
            for rank, part in self.hear(found, meanwhile).items():
                found[rank] += part
        return found

    def close(self) -> None:
        """Whoever waits for this process gets an error, or has one when it comes to; so do its own threads."""
        self._is_closed = True  # before anybody wakes up, who looks at it first
        for each in self._lines.values():
            with contextlib.suppress(OSError):  # it is closed
                each.shutdown(socket.SHUT_RDWR)
        self.leave()

    def leave(self) -> None:
        """Use them no more; another process that has them may go on."""
        self._is_closed = True
        for each in (*self._lines.values(), *([self._listener] if self._listener is not None else [])):
            each.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("the process group has been destroyed")


def _address(first: int, second: int) -> bytes:
    return f"\0infinity-{first:016x}{second:016x}".encode()


def _whole(message: bytes) -> bytes:
    if not message:
        raise ConnectionResetError("its connection is closed")
    return message


def _connected(address: bytes, hello: bytes) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.setblocking(False)  # whose list of those that wait is full is not waited for
        line.connect(address)
        line.send(hello)
    except BaseException:
        line.close()
        raise
    return line


def _accepted(listener: socket.socket, secret: int) -> tuple[socket.socket, int]:
    """The next one that has connected, and its rank; -1 if it has not proved itself."""
    line, _ = listener.accept()
    try:
        line.setblocking(False)
        told, rank = _HELLO.unpack(line.recv(_HELLO.size + 1))
    except (OSError, struct.error):
        return line, -1
    return line, rank if told == secret else -1


_open: Roll[Lines] = Roll(in_child=Lines.leave)
"""A forked child that outlives the process must not keep its lines open."""
