"""What all tests share: options, and what a test may need, each skipping with its reason where it cannot be had.

- `nvme_dir`: an empty directory on a block device (O_DIRECT and byte counters mean something there).
- `several_threads`: torch computes with more than the one that it has otherwise: small models spend ten times as long on
  waking others as on computing.
- `small_tmpfs`: mounts file systems of a given size, for tests of a full disk.
- `memory_cgroup`, `blkio_cgroup`: control groups that limit and measure the processes put into them.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

_REPOSITORY = Path(__file__).resolve().parent.parent
os.environ.setdefault("INFINITY_DEBUG", "1")  # before the packages are imported, which check changes of states then

if TYPE_CHECKING:
    from tests.internals import Cgroup


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options must be declared here: pytest reads no deeper conftest.py before the command line."""
    parser.addoption("--all", action="store_true", help="run the deep tests as well: see tests/README.md")
    parser.addoption(
        "--full-grid", action="store_true", help="run the exactness suite over its whole grid (days on two cores)"
    )
    parser.addoption("--nvme-dir", default=None, help="directory on the drive that tests of real files use")


def pytest_configure() -> None:
    hypothesis.settings.register_profile("tests", deadline=None)  # a busy machine makes no example wrong
    hypothesis.settings.load_profile("tests")
    torch.set_num_threads(1)
    # Threads of other processes that wait for each other sleep meanwhile: there are more of them than processors.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Shells start what runs in the background with SIGINT ignored, also in what that starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_DEEP_FILE = re.compile(r"^pytestmark = .*\bpytest\.mark\.deep\b", re.MULTILINE)


def _is_named(path: Path, config: pytest.Config) -> bool:
    """Whether the command line names the file itself, not a folder above it."""
    return any(Path(config.invocation_params.dir, name.partition("::")[0]) == path for name in config.args)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick tier does not import files that are deep as a whole: collecting them takes half a minute of each worker."""
    if config.getoption("--all") or collection_path.suffix != ".py" or _is_named(collection_path, config):
        return None
    return True if _DEEP_FILE.search(collection_path.read_text()) else None


def _deep(items: list[pytest.Item], config: pytest.Config) -> set[pytest.Item]:
    """The tests that only `--all` runs, or a command line that names their file.

    ``deep`` marks a test as one of them; ``deep(but=2)`` marks all of its cases but two, evenly spread.
    """
    deep, cases = set(), defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("deep")
        if marker is None or _is_named(item.path, config):
            continue
        if marker.kwargs:
            cases[item.path, item.nodeid.partition("[")[0], marker.kwargs["but"]].append(item)
        else:
            deep.add(item)
    for (_, _, num_quick), group in cases.items():
        quick = {len(group) * place // num_quick for place in range(num_quick)}
        deep |= {item for place, item in enumerate(group) if place not in quick}
    return deep


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` or `root` where they cannot run, and leaves deep ones to `--all`."""
    if not config.getoption("--all"):
        deep = _deep(items, config)
        config.hook.pytest_deselected(items=[item for item in items if item in deep])
        items[:] = [item for item in items if item not in deep]
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "no CUDA device here"
    if os.geteuid() != 0:
        reasons["root"] = "needs root"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests marked `off_main_thread` run on another one."""
    if pyfuncitem.get_closest_marker("off_main_thread") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with ThreadPoolExecutor(1) as executor:
        executor.submit(pyfuncitem.obj, **arguments).result()
    return True


def pytest_collection_finish() -> None:
    """What is imported by now stays: else each collection in a test takes a fifth of a second to find that out again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Libraries write to the environment what others in the same process then believe: a launcher's rank, a seed."""
    before, on_interrupt = dict(os.environ), signal.getsignal(signal.SIGINT)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    signal.signal(signal.SIGINT, on_interrupt)  # Lightning replaces it when it leaves a process group


@pytest.fixture(autouse=True)
def no_call_left_inside() -> Iterator[None]:
    """Else the process's main thread looks at memory unguarded in all tests to come."""
    yield
    from infinity.threads import engine_lock  # not above: it would come before INFINITY_DEBUG

    if engine_lock.is_inside():
        vars(engine_lock._inside).clear()
        pytest.fail("the test has left a call inside an engine")


@pytest.fixture
def several_threads() -> Iterator[None]:
    """torch computes with two to four threads."""
    torch.set_num_threads(max(2, min(4, os.cpu_count() or 1)))
    yield
    torch.set_num_threads(1)


@pytest.fixture
def nvme_dir(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Path]:
    """An empty directory on a block device: on `--nvme-dir`, else pytest's own drive, else the repository's."""
    chosen = pytestconfig.getoption("--nvme-dir")
    from tests.internals import block_device

    candidates = [Path(chosen)] if chosen else [tmp_path, _REPOSITORY]
    for candidate in candidates:
        if block_device(candidate) is not None and os.access(candidate, os.W_OK):
            with tempfile.TemporaryDirectory(prefix=".nvme_test_", dir=candidate) as directory:
                yield Path(directory)
            return
    pytest.skip(f"none of {', '.join(map(str, candidates))} lies on a block device; name one with --nvme-dir")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that mounts a new tmpfs of the given number of bytes and returns its mount point."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounts: list[Path] = []

    def mount(num_bytes: int) -> Path:
        point = tmp_path / f"tmpfs_{len(mounts)}"
        point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(point)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            pytest.skip(f"tmpfs cannot be mounted here: {answer.stderr.strip()}")
        mounts.append(point)
        return point

    yield mount
    for point in mounts:
        # Lazily: a test that lost its drive on purpose may have unmounted it, or still hold a file.
        subprocess.run(["umount", "--lazy", str(point)], capture_output=True, check=False)


def _cgroup(controller: str) -> Iterator[Cgroup]:
    from tests.internals import Cgroup, why_unavailable

    reason = why_unavailable(controller)
    if reason is not None:
        pytest.skip(reason)
    with Cgroup(f"test_{controller}", (controller,)) as group:
        yield group


@pytest.fixture
def memory_cgroup() -> Iterator[Cgroup]:
    """A memory control group; `run_in_cgroup` starts processes inside it."""
    yield from _cgroup("memory")


@pytest.fixture
def blkio_cgroup() -> Iterator[Cgroup]:
    """A control group that can throttle drives; `run_in_cgroup` starts processes inside it."""
    yield from _cgroup("blkio")


@pytest.fixture
def run_in_cgroup() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function `(group, code, timeout_seconds)`: runs Python source in a process that joins `group` first."""

    def run(group: Cgroup, code: str, timeout_seconds: float = 560.0) -> subprocess.CompletedProcess[str]:
        command = group.command(sys.executable, "-c", code)
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, check=False, cwd=_REPOSITORY
        )

    return run


@pytest.fixture
def run_in_little_memory(
    memory_cgroup: Cgroup, run_in_cgroup: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., list[dict[str, Any]]]:
    """A function that calls one of `tests`' modules, with the control group as its first argument, in a process inside that.

    ``first`` is run before. The process has to end well; what it printed as JSON is returned.
    """

    def run(module: str, function: str, *args: Any, first: str = "", **kwargs: Any) -> list[dict[str, Any]]:
        group, memory = str(memory_cgroup.task_files[0].parent), memory_cgroup.memory
        words = [*map(repr, (group, *args)), *(f"{name}={value!r}" for name, value in kwargs.items())]
        code = f"{first}\nfrom tests.{module} import {function}\n{function}({', '.join(words)})\n"
        ended = run_in_cgroup(memory_cgroup, code, 580.0)
        assert memory is not None and not memory.num_out_of_memory_kills, (
            "the kernel ended it: it took more memory than its limit"
        )
        assert ended.returncode == 0, ended.stderr
        return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')]

    return run
