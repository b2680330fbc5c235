"""Every error this package raises, in one tree.

    SwapperError
    ├── ArgumentError (ValueError)      a setting, a size, a buffer or a range that cannot work
    ├── VolumeError                     scratch space could not be set up; nothing was left behind
    │   ├── VolumeTooSmallError         what is needed and what there is are attributes
    │   └── DurableRunError             a durable run is in use, damaged, or of another version
    ├── BackendUnavailableError         this way of moving bytes cannot be used here; says what would make it work
    ├── LimitError (RuntimeError)       a limit of the system on threads, memory or open files is reached
    ├── OutOfSpaceError                 no room for one more extent in an open volume
    ├── ExtentError                     use after free or in another swapper, or a read of bytes that no write left there
    ├── TransferError                   the drive refused: file, offset, bytes and errno are attributes
    │   ├── ChecksumMismatchError       the drive gave back other bytes than were written
    │   └── StallError (TimeoutError)   no answer within the deadline
    ├── StagingExhaustedError (TimeoutError)   no staging buffer became free in time; names who holds them
    ├── SwapperClosedError              use after close or release, in a forked child, or cut short by close
    └── ReentryError (RuntimeError)     a signal handler or finalizer came in between, where this cannot be done

Errors of the operating system are mapped where a transfer completes, and stay attached as ``__cause__``.
"""

from __future__ import annotations

import contextlib
import errno as errno_codes
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal


def error_words(error: OSError) -> str:
    """Return the text, the number and the name of an operating system's error."""
    return f"{error.strerror} (errno {error.errno}, {errno_codes.errorcode.get(error.errno or 0, '?')})"


_LIMIT_CURES = {
    errno_codes.EMFILE: "raise the limit on open files of a process (ulimit -n)",
    errno_codes.ENFILE: "raise the limit on open files of the machine (sysctl fs.file-max)",
    errno_codes.EFBIG: "raise the limit on the size of a file (ulimit -f); if there is none, the file system takes no larger "
    "one: name more directories, or one on another file system",
}


def limit_cure(error: BaseException | None) -> str:
    """Return what to do about an error that is due to a limit, and not to a directory; empty for all others."""
    return _LIMIT_CURES.get(error.errno or 0, "") if isinstance(error, OSError) else ""


_WRITE_CURES = {
    errno_codes.ENOSPC: "Free space on the drive",
    errno_codes.EDQUOT: "Free space, or raise this user's quota on the drive",
    errno_codes.ENOENT: "Mount the drive again, or restore the directory",
    errno_codes.ENOTDIR: "Restore the directory",
    errno_codes.ESTALE: "Mount the network drive again",
    errno_codes.ENODEV: "Mount the drive again",
    errno_codes.ENXIO: "Mount the drive again",
    errno_codes.EROFS: "Mount the drive with write access: many file systems become read-only when their drive fails",
    errno_codes.EACCES: "Give this user write access to the directory",
    errno_codes.EPERM: "Give this user write access to the directory",
    errno_codes.EIO: "Replace the drive",
    errno_codes.ETIMEDOUT: "Check that the drive responds",
}


def write_cure(error: BaseException | None) -> str:
    """Return what to do about an error of writing, by the operating system's error among its causes."""
    while error is not None:
        number = getattr(error, "errno", None)
        cure = limit_cure(error) or _WRITE_CURES.get(number or 0, "")
        if isinstance(error, LimitError):
            cure = error.cure
        if cure:
            return cure[0].upper() + cure[1:]
        error = error.__cause__ or error.__context__
    return "Correct that"


class SwapperError(Exception):
    """Base of all errors of this package."""


class ArgumentError(SwapperError, ValueError):
    """A setting or an argument cannot work."""


class VolumeError(SwapperError):
    """Scratch space could not be set up in a directory; nothing was left behind."""

    def __init__(self, directory: Path, message: str) -> None:
        self.directory = directory
        super().__init__(message)

    @classmethod
    def unwritable(cls, directory: Path, reason: OSError | str) -> VolumeError:
        """A file cannot be made in the directory. ``reason``: a sentence, or the operating system's error."""
        cure = "give this user write access there or choose another directory"
        if isinstance(reason, OSError):
            if reason.errno == errno_codes.EROFS:
                cure = "mount it with write access or choose another directory"
            cure = limit_cure(reason) or cure
            reason = error_words(reason)
        return cls(directory, f"cannot make a scratch file in directory {str(directory)!r}: {reason}; {cure}")

    @classmethod
    def not_own(cls, path: Path, problem: str, *, cure: str = "") -> VolumeError:
        """A file or directory whose name others can guess is not this user's alone. ``cure``: what else may help."""
        more = f", or {cure}" if cure else ""
        return cls(
            path, f"{str(path)!r} {problem}, so it is not used; name a directory that only you can write to{more}"
        )


@contextlib.contextmanager
def as_unwritable(directory: Path) -> Iterator[None]:
    """Turn an OSError of the ``with`` block into the error of a directory that cannot be written to."""
    try:
        yield
    except OSError as error:
        raise VolumeError.unwritable(directory, error) from error


@contextlib.contextmanager
def as_volume_error(directory: Path, problem: str, cure: str = "choose another directory") -> Iterator[None]:
    """Turn an OSError of the ``with`` block into a `VolumeError`. ``cure``: unless it is due to a limit."""
    try:
        yield
    except OSError as error:
        raise VolumeError(directory, f"{problem}: {error_words(error)}; {limit_cure(error) or cure}") from error


class VolumeTooSmallError(VolumeError):
    """The directories have too little space.

    Attributes:
        directory: The one that is too small or, of several, the one that gives least.
        needed_bytes: How much is needed in it or, of several, in all of them.
        free_bytes: How much it has, or all of them have.
        capacities: Of several directories: how much each could give, and what limits it.
    """

    def __init__(
        self,
        directory: Path,
        needed_bytes: int,
        free_bytes: int,
        reason: str = "",
        capacities: Sequence[tuple[Path, int, str]] = (),
    ) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.capacities = tuple(capacities)
        detail = f" ({reason})" if reason else ""
        if capacities:
            parts = ", ".join(f"{str(path)!r} {num_bytes} ({limit})" for path, num_bytes, limit in capacities)
            what = (
                f"the directories are too small together: {needed_bytes} bytes are needed and they can give "
                f"{free_bytes}{detail}: {parts}"
            )
        else:
            what = (
                f"directory {str(directory)!r} is too small{detail}: {needed_bytes} bytes are needed there and "
                f"{free_bytes} are free"
            )
        super().__init__(directory, f"{what}; free some space, add a directory on another drive, or ask for less")


class DurableRunError(VolumeError):
    """A durable run in a directory is in use, damaged, or of another version.

    Attributes:
        kind: Which of these.
    """

    def __init__(self, directory: Path, message: str, kind: Literal["in use", "damaged", "of another version"]) -> None:
        self.kind = kind
        super().__init__(directory, message)

    @classmethod
    def in_use(cls, directory: Path) -> DurableRunError:
        """Another process, or somebody else in this one, has it."""
        message = (
            f"a durable run in {str(directory)!r} is in use, by another process or another engine of this one; "
            "wait for it to end, or name another directory"
        )
        return cls(directory, message, "in use")

    @classmethod
    def damaged(cls, path: Path, problem: str) -> DurableRunError:
        """A commit is not what was written."""
        message = (
            f"{str(path)!r} is damaged: {problem}; do not use this drive any more. Start from a checkpoint in "
            "another directory"
        )
        return cls(path.parent, message, "damaged")

    @classmethod
    def of_another_version(cls, path: Path, found: int, known: int, maker: str = "") -> DurableRunError:
        """A commit was written by another version, mostly a later one. ``maker``: the program and version that wrote it."""
        by = f", written by {maker}" if maker else ""
        message = f"{str(path)!r} has format {found}{by}, and this version knows format {known}; use the version that wrote it"
        return cls(path.parent, message, "of another version")


class BackendUnavailableError(SwapperError):
    """A way of moving bytes cannot be used on this machine or with these files.

    Attributes:
        backend: Its name in the config.
        reason: What is in the way.
        cure: What would make it work.
    """

    def __init__(self, backend: str, reason: str, cure: str) -> None:
        self.backend, self.reason, self.cure = backend, reason, cure
        super().__init__(f"backend {backend!r} cannot be used: {reason}; {cure}, or choose another backend")


class LimitError(SwapperError, RuntimeError):
    """A limit of the system on threads, memory or open files is reached.

    Attributes:
        limit: On what: ``"threads"``, ``"memory"`` or ``"open files"``.
        reason: What the system said.
        cure: How to have more, or to need less.
    """

    def __init__(self, limit: str, reason: str, cure: str) -> None:
        self.limit, self.reason, self.cure = limit, reason, cure
        super().__init__(f"the system's limit on {limit} is reached: {reason}; {cure}")

    @classmethod
    def of(cls, error: BaseException) -> LimitError | None:
        """Return the `LimitError` for an error that is due to a limit; None for others."""
        if isinstance(error, OSError):
            code, reason = error.errno, str(error) if error.errno is None else error_words(error)
        else:
            code, reason = None, str(error) or type(error).__name__
        if code in (errno_codes.EMFILE, errno_codes.ENFILE):
            return cls("open files", reason, limit_cure(error))
        if code == errno_codes.ENOMEM or isinstance(error, MemoryError):
            return cls("memory", reason, _MEMORY_CURE)
        if isinstance(error, RuntimeError) and not isinstance(error, SwapperError) and _NO_THREAD in reason:
            if _has_no_addresses():  # Python has one message for both: here the thread's stack did not fit
                return cls("memory", reason, _MEMORY_CURE)
            return cls("threads", reason, _THREAD_CURE)
        return None


def _has_no_addresses() -> bool:
    """Whether a limit on this process's address space (RLIMIT_AS) leaves no room for the stack of a thread."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return False
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)  # glibc's default size of a thread's stack
    needed = 2 * (stack if 0 < stack < 1 << 30 else 8 << 20)  # with a reserve; 8 MiB is the usual limit
    return limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() < needed


_NO_THREAD = "start new thread"  # of "can't start new thread", the only mark of this RuntimeError
_THREAD_CURE = (
    "raise it (ulimit -u, or the container's limit on processes), or take a smaller num_threads (in a training, "
    "config keys aio.intra_op_parallelism and infinity.update_workers)"
)
_MEMORY_CURE = (
    "raise it (ulimit -v, ulimit -l, the container's limit on memory, or sysctl vm.overcommit_memory and "
    "vm.max_map_count), or ask for less (in a training, a smaller infinity.host_memory_budget)"
)


class OutOfSpaceError(SwapperError):
    """An open volume has no room for one more extent."""

    def __init__(self, extent_name: str, needed_bytes: int, free_bytes: int, largest_free_bytes: int) -> None:
        self.extent_name = extent_name
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.largest_free_bytes = largest_free_bytes
        super().__init__(
            f"no room for extent {extent_name!r}: {needed_bytes} bytes are needed, {free_bytes} are free "
            f"({largest_free_bytes} in one piece); open with a larger capacity_bytes or free extents first"
        )


class ExtentError(SwapperError):
    """An extent is not in a state that allows the request."""

    def __init__(self, extent_name: str, message: str) -> None:
        self.extent_name = extent_name
        super().__init__(message)

    @classmethod
    def unwritten(cls, extent_name: str, offset: int, num_bytes: int) -> ExtentError:
        """A read of bytes that nobody has written."""
        message = (
            f"extent {extent_name!r} was never written at bytes {offset} to {offset + num_bytes}; "
            "write it before reading"
        )
        return cls(extent_name, message)

    @classmethod
    def broken(cls, extent_name: str, offset: int, num_bytes: int) -> ExtentError:
        """A read of bytes whose last write failed: what lies there is neither old nor new."""
        message = (
            f"extent {extent_name!r} cannot be read at bytes {offset} to {offset + num_bytes}: the last write there "
            "failed; write that range again, whole, or start over from saved data"
        )
        return cls(extent_name, message)


class TransferError(SwapperError):
    """A drive failed to read or write.

    Attributes:
        operation: ``"read"`` or ``"write"``.
        extent_name: The extent that was transferred.
        file: The scratch file or device, in words.
        offset: The byte in that file where the failed transfer starts.
        num_bytes: Length of the failed transfer.
        errno: The operating system's error number, or ``None``.
        contents: What lies in these bytes, as far as whoever allocated the extent can say: FQNs of parameters.
    """

    def __init__(
        self,
        operation: str,
        extent_name: str,
        file: str,
        offset: int,
        num_bytes: int,
        errno: int | None,
        detail: str,
        contents: str = "",
    ) -> None:
        self.operation = operation
        self.extent_name = extent_name
        self.file = file
        self.offset = offset
        self.num_bytes = num_bytes
        self.errno = errno
        self.contents = contents
        held = f": {contents}" if contents else ""
        super().__init__(
            f"{operation} of {num_bytes} bytes at offset {offset} of {file} (extent {extent_name!r}{held}) {detail}"
        )


def refusal(error: OSError) -> str:
    """Describe the operating system's error of a transfer, and what to do about it."""
    code = error.errno
    if code is None:
        return f"failed: {error}"
    name = errno_codes.errorcode.get(code, "?")
    cure = _CURES.get(code) or limit_cure(error) or _DEFAULT_CURE
    return f"failed: {os.strerror(code)} (errno {code}, {name}); {cure}"


_DEFAULT_CURE = "look at the kernel log for this drive"
_CURES = {
    errno_codes.EIO: "the drive reports a hardware error: see the kernel log, replace it or take another directory",
    errno_codes.ETIMEDOUT: "the drive did not answer the kernel: see the kernel log, replace it or take another directory",
    errno_codes.ENODEV: "the drive has gone away: reconnect it or choose another directory",
    errno_codes.ENXIO: "the drive has gone away: reconnect it or choose another directory",
    errno_codes.ENOSPC: "the file system is full although the space was reserved at the start, so it writes copies of what "
    "is rewritten (btrfs, zfs, snapshots): free some space on it, or choose a directory on ext4 or xfs",
    errno_codes.EDQUOT: "the disk quota is used up: raise it or choose another directory",
    errno_codes.ESTALE: "the server has lost the file: mount it again or choose another directory",
    errno_codes.ENOTCONN: "the process that serves the file system has ended: mount it again",
    errno_codes.EINVAL: "the file system refuses direct transfers of this size: open with direct=False (in a training, "
    "set config key infinity.direct_io to false)",
    errno_codes.EROFS: "the file system became read-only, usually after an error: see the kernel log",
    errno_codes.EFAULT: "the memory of the buffer was released while the transfer ran: keep it until then",
    errno_codes.EAGAIN: "the kernel was out of resources for longer than max_retries attempts: lower num_threads "
    "(in a training, config key aio.intra_op_parallelism)",
    errno_codes.ESHUTDOWN: "the process is ending: wait for transfers before it does",
    errno_codes.ENOMEM: "the kernel was out of memory for the transfer: lower num_threads or request_bytes (in "
    "a training, config keys aio.intra_op_parallelism and aio.block_size)",
}


class ChecksumMismatchError(TransferError):
    """Bytes that were read are not those that were written; ``offset`` and ``num_bytes`` say which, to a checksum's page.

    What was read is in the buffer and must not be used. The extent stays as it is: another read tells whether the
    damage lies on the drive, and a write of the same bytes heals it.
    """


class StallError(TransferError, TimeoutError):
    """A transfer, or a wait for one, saw no answer within its deadline.

    The kernel may still hold the buffer of a stalled transfer: do not reuse its memory.
    """


class StagingExhaustedError(SwapperError, TimeoutError):
    """No staging buffer became free in time."""

    def __init__(self, num_buffers: int, waited_seconds: float, owners: Sequence[tuple[str, int]]) -> None:
        self.num_buffers = num_buffers
        self.owners = tuple(owners)
        held = ", ".join(f"{owner or 'unnamed'}: {count}" for owner, count in owners) or "nobody"
        super().__init__(
            f"none of the {num_buffers} buffers of the staging pool became free within {waited_seconds:g} seconds; "
            f"held by {held}; release buffers sooner or make the staging pool larger (in a training, where a drive "
            "may be too slow for it, raise config key infinity.io_deadline_seconds, or infinity.host_memory_budget)"
        )


class SwapperClosedError(SwapperError):
    """A swapper, a staging pool or a staging buffer is used after its close or release, or by a forked child of its process."""


class ReentryError(SwapperError, RuntimeError):
    """A signal handler or a finalizer made a call that would damage the call that it interrupted on the same thread.

    Attributes:
        what: What was asked for.
        interrupted: What the thread was doing.
    """

    def __init__(self, what: str, interrupted: str) -> None:
        self.what = what
        self.interrupted = interrupted
        super().__init__(
            f"{what} cannot be done here: a signal handler or finalizer interrupted {interrupted} on this thread, "
            "which has to finish first; set a flag in the handler, and act on it between two steps"
        )
