"""Memory, processors, a GPU, and the packages that a training needs."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from infinity.device.host_memory import free_bytes, free_share, is_unified, memory_limits
from infinity.machine.finding import Finding, Verdict, size
from infinity.machine.hardware import copy_finding, gpu_devices, is_wsl, link_finding, measure_copies
from infinity.version import __version__

_LEAST_BYTES = 500e6
_LITTLE_BYTES = 4e9
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_CPU_LIMIT_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_EXTRAS = {
    "transformers": ("hf", "models of Hugging Face, and plans of their configs"),
    "liburing": ("uring", "io_uring, which needs less CPU time for the same bytes"),
}


def computing_findings(*, measures: bool = True) -> Iterator[Finding]:
    """All of them; ``measures``: copies to and from the GPU, too."""
    yield Finding(
        "versions",
        Verdict.NOTE,
        f"infinity {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}",
        "",
        {"infinity": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )
    yield _memory()
    yield from _limits()
    yield _processors()
    yield _gpu()
    yield from _of_the_gpu(measures=measures)
    for name, (extra, purpose) in _EXTRAS.items():
        try:
            yield Finding(f"package {name}", Verdict.GOOD, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            cure = f"pip install 'infinity-offload[{extra}]': {purpose}"
            yield Finding(f"package {name}", Verdict.NOTE, "not installed", cure)


def _memory() -> Finding:
    free, total = free_bytes(), int(psutil.virtual_memory().total)
    share = free_share(holds_activations=not torch.cuda.is_available(), is_unified=is_unified())
    facts = {"free_bytes": free, "total_bytes": total, "budget_bytes": share.budget_bytes}
    text = f"{size(free)} of {size(total)} free; a run takes at most {size(share.budget_bytes)} of it by itself"
    if free < _LEAST_BYTES:
        return Finding(
            "memory", Verdict.BAD, text, "End other programs, or raise the limit of the control group", facts
        )
    if free < _LITTLE_BYTES:
        cure = 'End other programs; or set "infinity": {"host_memory_budget": ...}, which holds the engine below it'
        return Finding("memory", Verdict.POOR, text, cure, facts)
    return Finding("memory", Verdict.GOOD, text, "", facts)


def _limits() -> Iterator[Finding]:
    total = int(psutil.virtual_memory().total)
    limits = [limit for limit in memory_limits() if limit.limit_bytes < total]
    if not limits:
        yield Finding("limit of the control group", Verdict.GOOD, "none below the machine's memory")
    for limit in limits:
        text = f"{size(limit.limit_bytes)}, of which {size(limit.free_bytes)} are left ({limit.folder})"
        facts = {"limit_bytes": limit.limit_bytes, "free_bytes": limit.free_bytes, "folder": str(limit.folder)}
        verdict = Verdict.NOTE if limit.free_bytes >= _LEAST_BYTES else Verdict.BAD
        cure = (
            "" if verdict is Verdict.NOTE else "Raise it (docker run --memory, memory.max), or end what is in the group"
        )
        yield Finding("limit of the control group", verdict, text, cure, facts)


def _processors() -> Finding:
    usable, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _quota()
    threads = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    facts = {"usable": usable, "all": all_of_them, "quota": quota, "torch_threads": threads, "capability": capability}
    text = f"{usable} of {all_of_them} usable, {threads} threads of torch, {capability}"
    if quota is not None and quota < usable:
        cure = f"Raise the limit (docker run --cpus), or set OMP_NUM_THREADS={max(1, math.floor(quota))}"
        return Finding("processors", Verdict.POOR, f"{text}; the control group allows {quota:.1f} of them", cure, facts)
    if threads > usable:
        cure = f"Set OMP_NUM_THREADS={usable}: threads beyond that wait for each other"
        return Finding("processors", Verdict.POOR, text, cure, facts)
    if not torch.cuda.is_available() and not os.environ.get(_HUGE_PAGES):
        return Finding(
            "processors",
            Verdict.NOTE,
            text,
            f"export {_HUGE_PAGES}=1: less time in the kernel where the CPU computes",
            facts,
        )
    return Finding("processors", Verdict.GOOD, text, "", facts)


def _quota() -> float | None:
    """Processors that the control group allows, as a fraction; None without a limit."""
    try:
        if _CPU_LIMIT.is_file():
            allowed, period = _CPU_LIMIT.read_text().split()
        else:
            allowed, period = (path.read_text().strip() for path in _CPU_LIMIT_V1)
        return None if allowed == "max" or int(allowed) < 0 else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _gpu() -> Finding:
    if torch.cuda.is_available():
        try:
            free, total = torch.cuda.mem_get_info()
        except RuntimeError as error:  # another process has all of it, or has it alone
            text = f"torch cannot use it: {str(error).strip().partition(chr(10))[0]}"
            cure = "End what has it (`nvidia-smi`), or set CUDA_VISIBLE_DEVICES: empty, the CPU computes"
            return Finding("GPU", Verdict.BAD, text, cure, {"names": []})
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts = {"names": names, "free_bytes": free, "total_bytes": total}
        return Finding(
            "GPU", Verdict.GOOD, f"{', '.join(names)}; {size(free)} of {size(total)} free on the first", "", facts
        )
    if _NVIDIA_DRIVER.exists():
        is_built = torch.version.cuda is not None
        text = "there is a driver of NVIDIA, and torch " + ("cannot use it" if is_built else "is built without CUDA")
        cure = "See `nvidia-smi`, and CUDA_VISIBLE_DEVICES" if is_built else "Install torch's CUDA build (pytorch.org)"
        return Finding("GPU", Verdict.POOR, text, cure, {"names": []})
    return Finding("GPU", Verdict.NOTE, "none: the CPU computes", "", {"names": []})


def _of_the_gpu(*, measures: bool) -> Iterator[Finding]:
    """Its links, its copies, and whether it has memory of its own; nothing without one."""
    if not torch.cuda.is_available():
        return
    for device in gpu_devices():
        yield link_finding(device, rests=True)
    try:
        if is_unified():
            text = "unified: the GPU computes in the host's memory. Budgets count it once, and give each side half"
            yield Finding("memory of the GPU", Verdict.NOTE, text, "", {"is_unified": True})
        if measures:
            yield copy_finding(measure_copies())
    except RuntimeError as error:  # no room on it: `_gpu` has said what to do
        yield Finding("copies", Verdict.NOTE, f"not measured: {str(error).strip().partition(chr(10))[0]}")
    if is_wsl():
        text = "Linux inside Windows: its driver pins little memory, and files under /mnt/c are slow"
        yield Finding("WSL2", Verdict.NOTE, text, "States on the Linux side's own disk (ext4)")
