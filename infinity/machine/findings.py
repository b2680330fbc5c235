"""Findings of `infinity doctor` about memory, processors, GPU, packages, and directories for states: what was found, what it
means for a training, and what would help.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import math
import os
import platform
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import psutil
import torch

from infinity.device.host_memory import find_free_memory, free_bytes, is_unified, memory_limits
from infinity.errors import size
from infinity.machine import hardware
from infinity.machine.bandwidth_cache import measured_bandwidth
from infinity.plan.model_shapes import count_words
from infinity.version import __version__
from swapper.config import SwapperConfig
from swapper.errors import BackendUnavailableError, SwapperError, VolumeError
from swapper.measure.by_name import open_by_name
from swapper.measure.choice import Choice, choose
from swapper.volumes.directory import Directory
from swapper.volumes.file_system import Drive, describe_drive
from swapper.volumes.volume import Volume


class Verdict(StrEnum):
    """What a finding means for a training."""

    GOOD = "good"
    NOTE = "note"
    """Neither: good to know."""
    POOR = "poor"
    """It works, and more would be possible."""
    BAD = "bad"
    """It prevents a training."""


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        verdict: what it means.
        what: its subject.
        text: what was found.
        cure: what would help; empty if nothing is to be done.
        directory: its directory; empty if it concerns none.
    """

    verdict: Verdict
    what: str
    text: str
    cure: str = ""
    directory: str = ""


# In the order of `Verdict`: good("memory", "64 GB") is Finding(Verdict.GOOD, "memory", "64 GB").
good, note, poor, bad = (functools.partial(Finding, verdict) for verdict in Verdict)
# Bytes of free memory. Below the first, Python with torch and transformers hardly fits (it takes about 0.4 GB); below
# the second, a training is possible, but swapping is near.
_LEAST_FREE_BYTES = 500e6
_LITTLE_FREE_BYTES = 4e9
# A variable of torch: its CPU allocator then asks for huge pages (madvise).
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# Quota and period in microseconds: "150000 100000" are 1.5 processors. The first file is of control groups version 2.
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_CPU_LIMIT_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
# Of the writes that the drive is rated for.
_WORN_PERCENT = 80
_EXTRAS = {
    "transformers": ("hf", "models of Hugging Face, and plans of their configs"),
    "liburing": ("uring", "io_uring, which needs less CPU time for the same bytes"),
}
_TRIAL_BYTES = 256 << 20
"""On a smaller volume, backends are not compared."""
# Bytes of free space: below the first nothing can be tried, below the second there is room for 1.7B parameters at most
# (12 bytes each, see `_space`).
_LEAST_SPACE_BYTES = 1 << 20
_LITTLE_SPACE_BYTES = 20e9
# io_uring's registered buffers count as locked memory. 64 MiB are the most that a profile keeps in flight on a drive.
_ENOUGH_LOCKED_BYTES = 64 << 20
# Time for the threads of a backend to end.
_STOP_SECONDS = 10.0


def computing_findings(*, measures: bool = True) -> Iterator[Finding]:
    """Yield the findings about everything but directories. ``measures``: also measure copies to and from the GPU."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    yield note("versions", f"infinity {__version__}, torch {torch.__version__}, {system}")
    yield _memory()
    yield from _limits()
    yield _processors()
    yield _gpu()
    if torch.cuda.is_available():
        yield from _of_the_gpu(measures=measures)
    for name, (extra, purpose) in _EXTRAS.items():
        try:
            yield good(f"package {name}", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield note(f"package {name}", "not installed", f"pip install 'infinity-offload[{extra}]': {purpose}")
    yield _locked_memory()


def _memory() -> Finding:
    free, total = free_bytes(), int(psutil.virtual_memory().total)
    free_memory = find_free_memory(holds_activations=not torch.cuda.is_available(), is_unified=is_unified())
    text = (
        f"{size(free)} of {size(total)} free; the default of host_memory_budget is {size(free_memory.budget_bytes)} now"
    )
    if free < _LEAST_FREE_BYTES:
        return bad("memory", text, "End other programs, or raise the limit of the control group")
    if free < _LITTLE_FREE_BYTES:
        cure = 'End other programs; or set "infinity": {"host_memory_budget": ...}, which holds the engine below it'
        return poor("memory", text, cure)
    return good("memory", text)


def _limits() -> Iterator[Finding]:
    what, total = "limit of the control group", int(psutil.virtual_memory().total)
    # A limit above the machine's memory limits nothing: containers without one have such a number.
    limits = [limit for limit in memory_limits() if limit.limit_bytes < total]
    if not limits:
        yield good(what, "none below the machine's memory")
    for limit in limits:
        text = f"{size(limit.limit_bytes)}, of which {size(limit.free_bytes)} are left ({limit.folder})"
        if limit.free_bytes >= _LEAST_FREE_BYTES:
            yield note(what, text)
        else:
            yield bad(what, text, "Raise it (docker run --memory, memory.max), or end other programs of the group")


def _processors() -> Finding:
    # The affinity mask counts the processors that this process may use; `os.cpu_count` counts all.
    what, usable, quota, threads = "processors", len(os.sched_getaffinity(0)), _quota(), torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{usable} of {os.cpu_count() or 1} usable, {threads} thread{'s' * (threads > 1)} of torch, {capability}"
    if quota is not None and quota < usable:
        cure = f"Raise the limit (docker run --cpus), or set OMP_NUM_THREADS={max(1, math.floor(quota))}"
        return poor(what, f"{text}; the control group allows {quota:.1f} of them", cure)
    # OpenMP threads beyond the processors take turns at barriers: each operation waits for one that does not run.
    if threads > usable:
        return poor(what, text, f"Set OMP_NUM_THREADS={usable}: threads beyond that wait for each other")
    if not torch.cuda.is_available() and not os.environ.get(_HUGE_PAGES):
        return note(what, text, f"export {_HUGE_PAGES}=1: less time in the kernel where the CPU computes")
    return good(what, text)


def _quota() -> float | None:
    """Return how many processors the control group allows, as a fraction; None without a limit."""
    try:
        if _CPU_LIMIT.is_file():
            allowed, period = _CPU_LIMIT.read_text().split()
        else:
            allowed, period = (path.read_text().strip() for path in _CPU_LIMIT_V1)
        # "max" in version 2 and -1 in version 1 mean no limit.
        return None if allowed == "max" or int(allowed) < 0 else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _gpu() -> Finding:
    if torch.cuda.is_available():
        try:
            free, total = torch.cuda.mem_get_info()
        except RuntimeError as error:  # another process has all of it, or has it alone
            text = f"torch cannot use it: {_first_line(error)}"
            cure = "End the program that uses it (`nvidia-smi` lists them), or set CUDA_VISIBLE_DEVICES"
            return bad("GPU", text, f"{cure}; with an empty value, the CPU computes")
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return good("GPU", f"{names}; {size(free)} of {size(total)} free on the first")
    # Tells a machine without a GPU from one whose torch does not see its GPU.
    if not _NVIDIA_DRIVER.exists():
        return note("GPU", "none: the CPU computes")
    text = "an NVIDIA driver is installed, but torch"
    if torch.version.cuda is None:
        return poor("GPU", f"{text} is built without CUDA", "Install torch's CUDA build (pytorch.org)")
    return poor("GPU", f"{text} cannot use it", "See `nvidia-smi`, and CUDA_VISIBLE_DEVICES")


def _of_the_gpu(*, measures: bool) -> Iterator[Finding]:
    """Yield findings about the links and copies of GPUs, and about unified memory."""
    for device in hardware.gpu_devices():
        # An idle GPU lowers the speed of its link to save power, so only its number of lanes is judged.
        yield link_finding(device, is_idle=True)
    try:
        if is_unified():
            text = "unified: the GPU computes in the host's memory. Budgets count it once, and give each side half"
            yield note("memory of the GPU", text)
        if measures:
            yield copy_finding(hardware.measure_copies())
    except RuntimeError as error:  # no room on it: `_gpu` has said what to do
        yield note("copies", f"not measured: {_first_line(error)}")
    if hardware.is_wsl():
        text = "Linux inside Windows: its driver pins little memory, and files under /mnt/c are slow"
        yield note("WSL2", text, "States on the Linux side's own disk (ext4)")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# -------------------------------------------------------------------------------------------------------------- devices


def link_finding(device: hardware.PciDevice, *, is_idle: bool) -> Finding:
    """Judge the link of a device. ``is_idle``: only its lanes count, not its speed."""
    speed, what = device.most_gigatransfers if is_idle else device.gigatransfers, f"link of {device.name}"
    now, most = (
        hardware.link_rate(speed, device.lanes),
        hardware.link_rate(device.most_gigatransfers, device.most_lanes),
    )
    # A narrower or slower link loses half as a rule, so the tolerance is only for rounding.
    if now >= 0.9 * most:
        return good(what, device.words())
    text = f"{device.words()}, where the device can {hardware.link_words(device.most_gigatransfers, device.most_lanes)}"
    cure = "Use another slot, or change the slot's setting in the firmware"
    return poor(what, text, f"{cure}: slots share lanes, and risers lower the speed")


def node_finding(devices: Sequence[hardware.PciDevice]) -> Finding | None:
    """Judge whether this process, its GPU and its drives are on one NUMA node; None on a machine of one node.

    ``devices``: GPUs before drives.
    """
    nodes = sorted(
        int(each.name.removeprefix("node")) for each in (hardware.SYS / "devices/system/node").glob("node[0-9]*")
    )
    if len(nodes) < 2:
        return None
    own = [node for node in nodes if hardware.processors_of(node) & os.sched_getaffinity(0)]
    text = f"{len(nodes)} nodes; this process may run on {', '.join(map(str, own))}"
    known = [each for each in devices if each.numa_node is not None]
    if not known:
        return note("NUMA", f"{text}; the system does not say where devices sit")
    # A GPU if there is one: drives and this process should be on its node.
    first = known[0]
    far = ", ".join(f"{each.name} on {each.numa_node}" for each in known if each.numa_node != first.numa_node)
    if far:
        cure = "Use drives on the GPU's node where there are some: bytes from the other node cross the link between processors"
        return poor("NUMA", f"{text}; {first.name} sits on {first.numa_node}, {far}", cure)
    text += f"; the devices sit on {first.numa_node}"
    if own != [first.numa_node]:
        bind = f"numactl --cpunodebind={first.numa_node} --membind={first.numa_node} python ..."
        return poor("NUMA", text, f"{bind}: staging memory then lies next to them")
    return good("NUMA", text)


def health_finding(block_device: str) -> Finding | None:
    """Judge temperature and wear of a drive; None if it reports neither."""
    found, told = hardware.health(block_device), []
    if found.celsius is not None:
        told.append(f"{found.celsius:.0f} °C")
    if found.used_percent is not None:
        told.append(
            f"{found.used_percent} % of the writes it is rated for are used, {found.spare_percent} % of its spare is left"
        )
    if not told:
        return None
    text = ", ".join(told)
    if (found.used_percent or 0) >= _WORN_PERCENT:
        return poor("health", text, "Plan its replacement: paging writes much (`infinity plan` says how much a day)")
    if (found.celsius or 0) >= hardware.HOT_CELSIUS:
        return poor("health", text, "Cool it (heat sink, air flow): hot drives slow down")
    return good("health", text)


def copy_finding(copies: hardware.Copies) -> Finding:
    """Judge the speed of copies between host and GPU."""
    text = f"{size(copies.up)}/s up, {size(copies.down)}/s down"
    if copies.refused:
        text = f"({copies.refused}): copies block the thread that launches kernels, {text}"
        on_wsl = "Windows: native Linux pins more than WSL2, or raise memory in .wslconfig"
        return poor(
            "copies", f"the driver registers no memory {text}", on_wsl if hardware.is_wsl() else "ulimit -l unlimited"
        )
    others = f"{size(copies.pageable_up)}/s and {size(copies.pageable_down)}/s from other"
    pinned = f"{hardware.COPY_BYTES / copies.register_seconds / 1e9:.0f} GB/s to pin it"
    return good("copies", f"{text} from pinned memory ({others}); {pinned}")


# --------------------------------------------------------------------------------------------------------------- drives


def storage_findings(directories: Sequence[Path], *, measures: bool) -> Iterator[Finding]:
    """Yield the findings about each directory, then those about all drives.

    Args:
        directories: where states would lie.
        measures: whether backends are compared, which writes about 100 MB to a file without a name.
    """
    drives: dict[Path, Drive] = {}
    for path in directories:
        place = path
        if not os.path.lexists(path) and path.parent.is_dir():
            place = path.parent
            told = "does not exist: infinity.initialize makes it, in the directory that is looked at here"
            yield poor("directory", told, "Check that its drive is mounted", str(path))
        try:
            drives[path] = writable_drive(place)
        except VolumeError as error:
            cure = "Name another directory with --nvme-path, or make this one (mkdir -p)"
            yield bad("directory", str(error), cure, str(path))
            continue
        for finding in _findings(drives[path], measures=measures):
            # `_findings` speaks of one drive, and does not know under which name it was asked for.
            yield replace(finding, directory=str(path))
    names = sorted({drive.device for drive in drives.values() if drive.device is not None})
    devices = [*hardware.gpu_devices(), *filter(None, map(hardware.drive_device, names))]
    if (nodes := node_finding(devices)) is not None:
        yield nodes
    # Two partitions, or two folders, on one drive.
    if len({drive.identity for drive in drives.values()}) < len(drives):
        told = f"several of {', '.join(map(str, drives))} are on one drive: striping over them adds no speed"
        yield poor("drives", told, "Name one directory for each drive")


def _findings(drive: Drive, *, measures: bool) -> Iterator[Finding]:
    yield _drive(drive)
    if drive.device is not None:
        if (link := hardware.drive_device(drive.device)) is not None:
            # Links of GPUs slow down while idle. The speed of a drive's link counts as it is.
            yield link_finding(link, is_idle=False)
        if (health := health_finding(drive.device)) is not None:
            yield health
    yield _space(drive)
    yield from _files(drive, measures=measures)
    found = measured_bandwidth([drive.path])
    if found is None:
        yield note("speed", "never measured", f"infinity profile {drive.path}")
    else:
        ways = f"{size(found.read_bytes_per_second)}/s read, {size(found.write_bytes_per_second)}/s written"
        yield good("speed", f"{ways}, {size(found.mixed_bytes_per_second)}/s both ways, measured on {found.date}")


def writable_drive(path: Path) -> Drive:
    """Return the drive under a directory.

    Raises:
        VolumeError: it is not a directory, or not writable.
    """
    drive = describe_drive(path)
    if not path.is_dir():
        raise VolumeError(path, f"{path} is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        # `os.access` says no in both cases; the cures differ.
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        raise VolumeError.unwritable(path, "its file system is mounted read-only" if is_read_only else "no permission")
    return drive


def _drive(drive: Drive) -> Finding:
    # Without a device, this is the folder of all devices, which has neither file.
    folder = hardware.SYS / "block" / (drive.device or "")
    model = hardware.text_of(folder / "device/model")
    words = f"{drive.words()}{f', {model}' if model else ''}"
    if drive.is_tmpfs:
        cure = "Name a directory on a local SSD: files here use the memory that offloading is meant to free"
        return poor("drive", f"{words}: its files are stored in memory", cure)
    if drive.is_network:
        return poor("drive", f"{words}: a network or FUSE file system", "Name a directory on a local SSD")
    # Virtual drives and device mappers say "rotational" whatever is below them.
    is_virtual = drive.device is None or drive.device.startswith(("vd", "xvd", "dm-", "md", "loop"))
    if hardware.text_of(folder / "queue/rotational") == "1" and not is_virtual:
        return poor("drive", f"{words}: a disk that rotates", "Name a directory on an SSD, preferably NVMe")
    if drive.device is None:
        return note("drive", f"{words}: the drive below it is not visible")
    return good("drive", words)


def _space(drive: Drive) -> Finding:
    what = "free space"
    if not drive.total_bytes:
        return note(what, "the file system knows no limit")
    # With AdamW in bf16: 2 bytes of weight and 10 of remainder and states per parameter.
    room = count_words(drive.free_bytes // 12)
    text = f"{size(drive.free_bytes)} of {size(drive.total_bytes)}: room for {room} (AdamW, bf16)"
    if drive.free_bytes < _LEAST_SPACE_BYTES:
        return bad(what, text, "Make room, or name another directory")
    if drive.free_bytes < _LITTLE_SPACE_BYTES:
        return poor(what, text, "Make room, or add a directory on another drive")
    return good(what, text)


def _files(drive: Drive, *, measures: bool) -> Iterator[Finding]:
    # A trial must not fill the drive that it judges.
    num_bytes = _TRIAL_BYTES if measures and drive.free_bytes > 4 * _TRIAL_BYTES else _LEAST_SPACE_BYTES
    try:
        with _silent():
            volume = Volume(Directory(drive.path), num_bytes)
    except SwapperError as error:
        yield bad("scratch files", str(error), "Name a directory on a local file system (ext4, xfs, btrfs)")
        return
    with contextlib.closing(volume):
        file = volume.files[0]
        if file.is_direct:
            yield good("O_DIRECT", "reads and writes go past the page cache")
        else:
            # Without O_DIRECT the kernel keeps a copy of all pages that go by, outside of the budget.
            text = f"refused: {file.buffered_because}; the page cache then takes memory of its own"
            yield poor("O_DIRECT", text, "Name a directory on ext4, xfs or btrfs on a local drive")
        with _silent():
            yield _backend(volume, measures=num_bytes == _TRIAL_BYTES)


def _backend(volume: Volume, *, measures: bool) -> Finding:
    # `choose` compares backends by a measurement, but needs none where io_uring is out of the question.
    if measures or not volume.is_direct or volume.is_network:
        return _finding_of(choose(volume, SwapperConfig()))
    try:  # as far as it can be told without a comparison
        open_by_name(volume, SwapperConfig(backend="uring")).close(_STOP_SECONDS)
    except BackendUnavailableError as error:
        return _finding_of(Choice.without_uring(error))
    return good("backend", "io_uring works; the engine uses it if it is faster than worker threads")


def _finding_of(choice: Choice) -> Finding:
    # "REASON; to change that, CURE", as `Choice.__str__` writes it.
    text, _, cure = str(choice).partition("; to change that, ")
    return poor("backend", text, cure) if cure else good("backend", text)


def _locked_memory() -> Finding:
    """Judge how much memory may be locked: the registered buffers of io_uring are."""
    what, limit = "memory that may be locked", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return good(what, "no limit")
    # CAP_IPC_LOCK lifts the limit.
    if os.geteuid() == 0:
        return good(what, f"{size(limit)}, which does not bind root")
    if limit >= _ENOUGH_LOCKED_BYTES:
        return good(what, size(limit))
    cure = "ulimit -l unlimited (or memlock in /etc/security/limits.conf): io_uring then needs less CPU time"
    return poor(what, size(limit), cure)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence the log of Swapper inside the ``with`` block: findings say the same."""
    swappers = logging.getLogger("swapper")
    level = swappers.level
    swappers.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        swappers.setLevel(level)
