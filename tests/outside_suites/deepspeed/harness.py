"""A pytest plugin: DeepSpeed's tests in front of this engine, each in processes of its own, as many as it asks for.

What it does with their harness: ranks are forked, not started anew, and meet by gloo. What tests import of DeepSpeed's private
parts is there as a name that nobody can use, so that a file's other tests run. Nothing of their checks is changed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

import infinity.as_deepspeed
from infinity.deepspeed.modules import why_absent
from infinity.errors import InfinityError
from tests.outside_suites.children import LAUNCHED, LIMIT_SECONDS, Children

_AFTER_SECONDS = 30.0
"""How long the other ranks have when one has failed or skipped."""
_MOST_RANKS = 4
"""A test that asks for more is run with so many."""
_OF_ANOTHER_RANK = re.compile("RankError: .*(has ended|in time)|Connection closed by peer|gloo")
"""In an error that follows from another rank's."""


class PrivateNameError(Exception):
    """A test uses a name of DeepSpeed's that is not public, or that is refused."""


class _Unusable(type):
    """The class of the names below: whatever is done with one says that it is private."""

    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        name = type.__getattribute__(cls, "private_name")  # of the base, where the tests make a class of their own
        raise PrivateNameError(f"{name}: {why_absent(name)}")

    def __getattr__(cls, name: str) -> Any:
        whole = type.__getattribute__(cls, "private_name")
        if name == "NAME":  # of a builder of operations: tests ask for it as they are imported
            return whole
        if name.startswith("__"):
            raise AttributeError(name)
        return _private(f"{whole}.{name}")

    def __instancecheck__(cls, instance: object) -> bool:
        return False

    __call__ = __subclasscheck__ = __getitem__ = __iter__ = __len__ = __contains__ = _refuse  # type: ignore[assignment]
    __setattr__ = __bool__ = __float__ = __int__ = __index__ = _refuse  # type: ignore[assignment]


class _AnyOperation(dict[str, bool]):
    """DeepSpeed's table of the operations that it can compile here."""

    def __missing__(self, name: str) -> bool:
        return True


_HARMLESS: dict[str, Any] = {
    "git_version_info.torch_info": {"version": torch.__version__, "nccl_version": "2.20", "cuda_version": "12.8"},
    "accelerator.is_current_accelerator_supported": lambda: True,
    "utils.torch.required_torch_version": lambda **_: True,
    "moe.utils.split_params_into_different_moe_groups_for_optimizer": lambda group: [group],
    "ops.op_builder.OpBuilder.installed_rocm_version": lambda: (0, 0),
    "runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1 << 20,
}
"""What their helpers ask for, and what they would hear from DeepSpeed where it can do all (and there are no experts)."""


def _private(name: str) -> Any:
    if name.endswith("__compatible_ops__"):
        return _AnyOperation()
    if name in _HARMLESS:
        return _HARMLESS[name]
    return _Unusable(name.rpartition(".")[2], (), {"private_name": name})


class _PrivateModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of DeepSpeed that there are not, while tests are collected."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name.startswith(("deepspeed.", "op_builder")) and name not in sys.modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = lambda name: _of_module(module, name)


def _of_module(module: ModuleType, name: str) -> Any:
    if name.startswith("__") and not name.endswith("ops__"):
        raise AttributeError(name)
    return _private(f"{module.__name__.partition('.')[2]}.{name}".lstrip("."))


class Suite(Children):
    """With DeepSpeed's harness."""

    def __init__(self) -> None:
        self._finder = _PrivateModules()
        self._before: dict[str, Any] = {}

    def asked(self, item: pytest.Item) -> str:
        """For how many processes a test asks, as DeepSpeed's harness finds it out."""
        of_class = getattr(item, "cls", None)
        if not getattr(of_class, "is_dist_test", False):
            return "1"
        mark = item.get_closest_marker("world_size")
        params = getattr(getattr(item, "callspec", None), "params", {})
        found = mark.args[0] if mark is not None else params.get("world_size", of_class.world_size)  # type: ignore[union-attr]
        return _sizes_in_words(found)

    def pytest_collection(self) -> None:
        """Private names can be imported from here on."""
        importlib.import_module("deepspeed")
        for name, module in list(sys.modules.items()):
            if name == "deepspeed" or name.startswith("deepspeed."):
                self._before[name] = vars(module).get("__getattr__")
                module.__dict__["__getattr__"] = lambda wanted, module=module: _of_module(module, wanted)
        sys.meta_path.insert(0, self._finder)

    def pytest_pycollect_makeitem(self, collector: pytest.Module, name: str, obj: Any) -> None:
        """Their classes of fixtures, which a current pytest does not take for fixtures. Tests come after them in a file."""
        if getattr(obj, "is_dist_fixture", False) is True and not inspect.isabstract(obj):
            pytest.register_fixture(name=name, func=lambda request: obj()(request), node=collector)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Not from here on: a test that looks whether there is something finds out."""
        sys.meta_path.remove(self._finder)
        for name, former in self._before.items():
            if former is None:
                del sys.modules[name].__dict__["__getattr__"]
            else:
                sys.modules[name].__dict__["__getattr__"] = former
        for name in ("deepspeed.git_version_info", "deepspeed.moe.utils", "deepspeed.ops"):  # asked for inside of tests
            module = sys.modules.setdefault(name, ModuleType(name))
            for whole, value in {**_HARMLESS, "ops.__compatible_ops__": _AnyOperation()}.items():
                if f"deepspeed.{whole}".rpartition(".")[0] == name:
                    setattr(module, whole.rpartition(".")[2], value)
        sys.modules["deepspeed"].initialize = _initialize  # type: ignore[attr-defined]
        common = sys.modules.get("unit.common")
        if common is not None:
            common.DistributedExec._launch_with_file_store = _launch  # type: ignore[attr-defined]

        _warm_up()


def _sizes_in_words(world_size: Any) -> str:
    return ",".join(map(str, [world_size] if isinstance(world_size, int) else world_size))


def _warm_up() -> None:
    """What an engine imports as it first trains is imported once, before there are children."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}, "fp16": {"enabled": True}}
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        engine.backward(engine(torch.ones(1, 4).half()).float().sum())
        engine.step()


def _launch(self: Any, request: Any, world_size: Any) -> None:
    """In place of DeepSpeed's own: the test, as each rank of a group, in this process if that is the only one."""
    sizes = [world_size] if isinstance(world_size, int) else world_size
    request.node.user_properties.append((LAUNCHED, _sizes_in_words([min(size, _MOST_RANKS) for size in sizes])))
    for size in (min(size, _MOST_RANKS) for size in sizes):
        folder = tempfile.mkdtemp(dir=str(request.getfixturevalue("tmpdir")))
        if size == 1:
            said = [("skipped", message)] if (message := self._dist_run(0, 1, "0", f"file://{folder}/store")) else []
        else:
            said = _run_ranks(self, size, Path(folder))
        failed = [message for outcome, message in said if outcome == "failed"]
        if failed:  # that of a rank that only missed another one says least
            pytest.fail(min(failed, key=lambda message: bool(_OF_ANOTHER_RANK.search(message))), pytrace=False)
        skipped = [message for outcome, message in said if outcome == "skipped"]
        if skipped:
            pytest.skip(skipped[0])
        if len(sizes) > 1 and size == 1:
            _leave_group()


def _leave_group() -> None:
    torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def _run_ranks(test: Any, size: int, folder: Path) -> list[tuple[str, str]]:
    """Call a test on each of several ranks. Returns "failed" or "skipped" and a message, of each rank that did not pass."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    children = [_fork_rank(test, rank, size, port, folder) for rank in range(size)]
    deadline = time.monotonic() + LIMIT_SECONDS
    said: list[tuple[str, str]] = []
    running = dict(enumerate(children))
    while running and time.monotonic() < deadline:
        for rank, child in list(running.items()):
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                continue
            del running[rank]
            end = folder / f"end{rank}"
            text = end.read_text() if end.exists() else json.dumps(["failed", f"the process of rank {rank} died"])
            if text:
                said.append(tuple(json.loads(text)))
                deadline = min(deadline, time.monotonic() + _AFTER_SECONDS)
        time.sleep(0.02)
    for rank, child in running.items():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not said:
            said.append(("failed", f"no answer of rank {rank} in {LIMIT_SECONDS:.0f} seconds"))
    return said


def _fork_rank(test: Any, rank: int, size: int, port: str, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    text = ""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        message = test._dist_run(rank, size, port, f"file://{folder}/store")
        text = json.dumps(["skipped", message]) if message else ""
    except BaseException as error:
        traceback.print_exc()
        text = json.dumps(["failed", "".join(traceback.format_exception_only(error)).strip()])
    finally:
        (folder / f"end{rank}").write_text(text)
        while not text and not all((folder / f"end{other}").exists() for other in range(size)):
            time.sleep(0.02)  # one that ends closes its connections, which may be others' last exchange
        os._exit(0)


class _Raises:
    """`pytest.raises` for which an error of ours is as good as a failed ``assert`` of DeepSpeed's; `match` stays."""

    def __init__(self) -> None:
        self._raises = pytest.raises

    def __call__(self, expected: Any, *args: Any, **kwargs: Any) -> Any:
        if expected is AssertionError:
            expected = (AssertionError, InfinityError)
        return self._raises(expected, *args, **kwargs)


def _initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize` after what DeepSpeed does first: weights are rounded to 16 bits, before main weights are made."""
    model = kwargs.get("model", args[1] if len(args) > 1 else None)
    config = (
        kwargs.get("config") or kwargs.get("config_params") or getattr(kwargs.get("args"), "deepspeed_config", None)
    )
    with contextlib.suppress(InfinityError), torch.no_grad():
        dtype = infinity.load_config(config).compute_dtype
        for parameter in model.parameters() if isinstance(model, torch.nn.Module) and dtype is not None else ():
            if parameter.dtype == torch.float32:
                parameter.copy_(parameter.to(dtype))
    return infinity.deepspeed.initialize(*args, **kwargs)


class _OnAnyDevice(torch.nn.parallel.DistributedDataParallel):
    """With what the tests compare: they name its device, which torch does not take of a CPU."""

    def __init__(
        self, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, **others: Any
    ) -> None:
        super().__init__(module, **others)


class _ScalerOnAnyDevice(torch.amp.GradScaler):
    """With what the tests compare: by default torch's is for a GPU, and does nothing on a CPU."""

    def __init__(self, device: str = "cpu", **others: Any) -> None:
        super().__init__(device, **others)


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest for ``-p``."""
    pytest.raises = _Raises()  # type: ignore[assignment]
    torch.amp.GradScaler = _ScalerOnAnyDevice  # type: ignore[misc]
    torch.nn.parallel.DistributedDataParallel = _OnAnyDevice  # type: ignore[misc]
    infinity.as_deepspeed.install()
    config.pluginmanager.register(Suite(), "deepspeed-suite")
