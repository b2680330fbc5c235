"""Findings about memory, processors, GPU and packages."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from infinity.device.host_memory import find_free_memory, free_bytes, is_unified, memory_limits
from infinity.errors import size
from infinity.machine.finding import Finding, bad, good, note, poor
from infinity.machine.hardware import copy_finding, gpu_devices, is_wsl, link_finding, measure_copies
from infinity.version import __version__

# Bytes of free memory. Below the first, Python with torch and transformers hardly fits (it takes about 0.4 GB); below
# the second, a training is possible, but swapping is near.
_LEAST_BYTES = 500e6
_LITTLE_BYTES = 4e9
# A variable of torch: its CPU allocator then asks for huge pages (madvise).
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# Quota and period in microseconds: "150000 100000" are 1.5 processors. The first file is of control groups version 2.
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_CPU_LIMIT_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_EXTRAS = {
    "transformers": ("hf", "models of Hugging Face, and plans of their configs"),
    "liburing": ("uring", "io_uring, which needs less CPU time for the same bytes"),
}


def computing_findings(*, measures: bool = True) -> Iterator[Finding]:
    """Yield all findings of this module. ``measures``: also measure copies to and from the GPU."""
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


def _memory() -> Finding:
    free, total = free_bytes(), int(psutil.virtual_memory().total)
    free_memory = find_free_memory(holds_activations=not torch.cuda.is_available(), is_unified=is_unified())
    text = f"{size(free)} of {size(total)} free; a run takes at most {size(free_memory.budget_bytes)} of it by itself"
    if free < _LEAST_BYTES:
        return bad("memory", text, "End other programs, or raise the limit of the control group")
    if free < _LITTLE_BYTES:
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
        if limit.free_bytes >= _LEAST_BYTES:
            yield note(what, text)
        else:
            yield bad(what, text, "Raise it (docker run --memory, memory.max), or end other programs of the group")


def _processors() -> Finding:
    # The affinity mask counts the processors that this process may use; `os.cpu_count` counts all.
    what, usable, quota, threads = "processors", len(os.sched_getaffinity(0)), _quota(), torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{usable} of {os.cpu_count() or 1} usable, {threads} threads of torch, {capability}"
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
    for device in gpu_devices():
        # An idle GPU lowers the speed of its link to save power, so only its number of lanes is judged.
        yield link_finding(device, rests=True)
    try:
        if is_unified():
            text = "unified: the GPU computes in the host's memory. Budgets count it once, and give each side half"
            yield note("memory of the GPU", text)
        if measures:
            yield copy_finding(measure_copies())
    except RuntimeError as error:  # no room on it: `_gpu` has said what to do
        yield note("copies", f"not measured: {_first_line(error)}")
    if is_wsl():
        text = "Linux inside Windows: its driver pins little memory, and files under /mnt/c are slow"
        yield note("WSL2", text, "States on the Linux side's own disk (ext4)")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
