"""A typed layer over io_uring as the ``liburing`` wheel brings it.

[Note: the wheel's C functions]
The wheel's own Python functions keep the interpreter's lock while they wait in the kernel, which would stop all other
threads. They also accept no memory but bytearrays. But the shared library inside the wheel exports liburing's C
functions, whose binary interface is meant for other languages. This module calls them through ctypes. Functions that
may block release the lock (``CDLL``). Short ones keep it (``PyDLL``): to release and take it costs more than the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import os
import select
from collections.abc import Callable, Iterator, Sequence

from swapper.errors import BackendUnavailableError, error_words
from swapper.uncopyable import closed_unless_made

# IORING_SETUP_* and IOSQE_* of <linux/io_uring.h>.
_SETUP_SUBMIT_ALL = 1 << 7  # one bad request does not hold up those behind it
_SETUP_SINGLE_ISSUER = 1 << 12  # only the thread that made the ring submits; DEFER_TASKRUN needs it
_SETUP_DEFER_TASKRUN = 1 << 13  # completions are processed when the ring's thread asks for them, not by interrupting it
_FLAGS = (_SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN | _SETUP_SUBMIT_ALL, 0)  # tried in this order, see Ring
_FIXED_FILE = 1  # `file` of a request is an index into the registered files
_BATCH = 256  # completions that one call of peek_batch returns
_MAX_TRANSFER_BYTES = 0x7FFF_F000  # what Linux moves at most at once; the rest is a short transfer

_INSTALL = "install it with: pip install 'infinity-offload[uring]'"
_CURES = {
    errno.EPERM: "allow io_uring (sysctl kernel.io_uring_disabled, the container's seccomp profile)",
    errno.EACCES: "allow io_uring (sysctl kernel.io_uring_disabled, the container's seccomp profile)",
    errno.ENOSYS: "use Linux 5.11 or newer, and allow io_uring in the container's seccomp profile",
    errno.ENOMEM: "raise the limit on locked memory (ulimit -l) or lower max_inflight",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files (sysctl fs.file-max)",
}

_Function = Callable[..., int]


class _RingState(ctypes.Structure):
    """``struct io_uring``: 216 bytes in liburing 2, and room up to 1024 for what later versions may append."""

    _fields_ = (
        ("queues", ctypes.c_uint64 * 24),  # the structs sq (104 bytes) and cq (88), which only liburing reads
        ("flags", ctypes.c_uint),
        ("ring_fd", ctypes.c_int),
        ("reserved", ctypes.c_uint * 206),
    )


class _Completion(ctypes.Structure):
    """``struct io_uring_cqe``."""

    _fields_ = (("user_data", ctypes.c_uint64), ("res", ctypes.c_int), ("flags", ctypes.c_uint))


class _Vector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Library:
    """The C functions; see [Note: the wheel's C functions]. Those that can fail return a negative error number.

    Args:
        path: The wheel's shared library.

    Raises:
        AttributeError: It does not export one of them.
        OSError: It cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        blocking, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        pointer, uint, sint, u64 = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64

        def function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> _Function:
            found = getattr(library, f"io_uring_{name}")
            found.restype, found.argtypes = result, arguments
            return found  # type: ignore[no-any-return]

        plain = (pointer, sint, pointer, uint, u64)  # sqe, file, address, length, offset
        self.queue_init = function(blocking, "queue_init", sint, uint, pointer, uint)
        self.queue_exit = function(blocking, "queue_exit", None, pointer)
        self.submit_and_wait = function(blocking, "submit_and_wait", sint, pointer, uint)
        self.register_files = function(blocking, "register_files", sint, pointer, pointer, uint)
        self.unregister_files = function(blocking, "unregister_files", sint, pointer)
        self.register_sparse = function(blocking, "register_buffers_sparse", sint, pointer, uint)
        self.update_buffers = function(
            blocking, "register_buffers_update_tag", sint, pointer, uint, pointer, pointer, uint
        )
        self.unregister_buffers = function(blocking, "unregister_buffers", sint, pointer)
        self.dontfork = function(quick, "ring_dontfork", sint, pointer)
        self.get_sqe = function(quick, "get_sqe", pointer, pointer)
        # Pairs, indexed by Direction.
        self.prepare = (function(quick, "prep_read", None, *plain), function(quick, "prep_write", None, *plain))
        self.prepare_fixed = (
            function(quick, "prep_read_fixed", None, *plain, sint),
            function(quick, "prep_write_fixed", None, *plain, sint),
        )
        self.prepare_poll = function(quick, "prep_poll_add", None, pointer, sint, uint)
        self.set_flags = function(quick, "sqe_set_flags", None, pointer, uint)
        self.set_data = function(quick, "sqe_set_data64", None, pointer, u64)
        self.peek_batch = function(quick, "peek_batch_cqe", uint, pointer, pointer, uint)
        self.advance = function(quick, "cq_advance", None, pointer, uint)


@functools.cache
def library() -> Library:
    """Return the C functions.

    Raises:
        BackendUnavailableError: The wheel is missing, or does not have them.
    """
    try:
        path = importlib.import_module("liburing.liburing").__file__
    except Exception as error:  # an extension made for another platform may raise anything
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        raise BackendUnavailableError("uring", f"the liburing package {what} ({error})", _INSTALL) from error
    try:
        return Library(str(path))
    except (AttributeError, OSError) as error:
        reason = f"the installed liburing package lacks what is needed ({error})"
        raise BackendUnavailableError("uring", reason, _INSTALL) from error


class Ring:
    """One io_uring with its registered files and memory.

    Only the thread that made it may use it, except :meth:`disown`. In a forked child its memory is not mapped.

    Args:
        num_entries: Number of requests that can be prepared between two submissions; twice as many can be in flight.
        fds: The files. Requests name them by their place in this list.

    Raises:
        BackendUnavailableError: The system forbids it.
    """

    def __init__(self, num_entries: int, fds: Sequence[int]) -> None:
        self._library = library()
        self._state = _RingState()
        self._address = ctypes.addressof(self._state)
        self._pointers = (ctypes.c_void_p * _BATCH)()  # peek_batch stores pointers to completions here
        for flags in _FLAGS:
            result = self._library.queue_init(num_entries, self._address, flags)
            if result != -errno.EINVAL:  # EINVAL: an older kernel does not know one of the flags
                break
        with needed("io_uring cannot be set up"):
            self._check(result)
        with needed("files cannot be registered with it"), closed_unless_made(self.close):
            self._check(self._library.dontfork(self._address))
            self._check(self._library.register_files(self._address, (ctypes.c_int * len(fds))(*fds), len(fds)))

    @staticmethod
    def _check(result: int) -> int:
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    @property
    def fd(self) -> int:
        """The ring's own file descriptor."""
        return int(self._state.ring_fd)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def prepare(
        self, direction: int, file: int, address: int, num_bytes: int, offset: int, token: int, slot: int = -1
    ) -> bool:
        """Put one transfer into the submission queue; return false if that is full.

        Args:
            direction: 0 to read, 1 to write.
            file: Which registered file.
            address: Where the memory starts. It must stay as it is until the request is reaped.
            num_bytes: How much; at most 2 GiB are moved at once.
            offset: Where in the file.
            token: Comes back with the completion.
            slot: The memory lies inside this registered slot; -1 for any memory.
        """
        functions = self._library
        entry = functions.get_sqe(self._address)
        if not entry:
            return False
        num_bytes = min(num_bytes, _MAX_TRANSFER_BYTES)  # the length of a request has 32 bits
        if slot < 0:
            functions.prepare[direction](entry, file, address, num_bytes, offset)
        else:
            functions.prepare_fixed[direction](entry, file, address, num_bytes, offset, slot)
        functions.set_flags(entry, _FIXED_FILE)
        functions.set_data(entry, token)
        return True

    def prepare_poll(self, fd: int, token: int) -> bool:
        """Have the ring complete ``token`` once a file can be read from; return false if the queue is full."""
        entry = self._library.get_sqe(self._address)
        if entry:
            self._library.prepare_poll(entry, fd, select.POLLIN)
            self._library.set_data(entry, token)
        return bool(entry)

    def submit(self, num_awaited: int) -> None:
        """Give what is prepared to the kernel and sleep until so many completions are there, or a signal comes.

        Raises:
            OSError: With ``EAGAIN`` and ``EBUSY`` the kernel is short of memory, or of room for completions: reap, and
                try again.
        """
        result = self._library.submit_and_wait(self._address, num_awaited)
        if result != -errno.EINTR:  # a signal ended the sleep: the loop looks for work and sleeps again
            self._check(result)

    def reap(self) -> list[tuple[int, int]]:
        """Return all completions that are there: the token, and the bytes transferred or a negative error number."""
        found: list[tuple[int, int]] = []
        while True:
            count = self._library.peek_batch(self._address, self._pointers, _BATCH)
            for index in range(count):
                # They lie in the kernel's ring, so their fields are copied before advance() gives the entries back.
                completion = _Completion.from_address(self._pointers[index] or 0)
                found.append((completion.user_data, completion.res))
            if not count:
                return found
            self._library.advance(self._address, count)

    # -- registered memory -------------------------------------------------------------------------------------------

    def make_slots(self, num_slots: int) -> None:
        """Make an empty table for registered memory, once.

        Raises:
            OSError: The kernel cannot.
        """
        self._check(self._library.register_sparse(self._address, num_slots))

    def fill_slot(self, slot: int, address: int, num_bytes: int) -> None:
        """Pin memory and remember it under a number.

        Args:
            slot: The number.
            address: Where it starts. It must stay mapped, and must not be given back with MADV_DONTNEED: the ring would
                go on using the old pages.
            num_bytes: At most 1 GiB; 0 releases what the slot holds.

        Raises:
            OSError: ``ENOMEM``: more than the limit on locked memory.
        """
        vector = _Vector(address if num_bytes else None, num_bytes)
        tag = ctypes.c_uint64(0)  # 0: no completion when the kernel drops the buffer
        self._check(self._library.update_buffers(self._address, slot, ctypes.byref(vector), ctypes.byref(tag), 1))

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything; nothing may be in flight."""
        # By hand: after queue_exit the kernel frees a ring later, in the background. Until then it would keep the files
        # open, and their space occupied.
        self._library.unregister_files(self._address)
        self._library.unregister_buffers(self._address)
        self._library.queue_exit(self._address)

    def disown(self) -> None:
        """In a forked child: close its copy of the descriptor, which would keep the parent's files open."""
        os.close(self.fd)


@contextlib.contextmanager
def needed(problem: str) -> Iterator[None]:
    """Turn an OSError of the ``with`` block into a `BackendUnavailableError`."""
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "see the kernel log")
        raise BackendUnavailableError("uring", f"{problem}: {error_words(error)}", cure) from error
