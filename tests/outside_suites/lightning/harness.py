"""A pytest plugin: Lightning's tests of its DeepSpeed strategies in front of this engine, without a GPU.

What it does with them: marks that ask for GPUs let a test run, Lightning's accelerator for GPUs has two, which are the CPU, and
an engine's threads may outlive a test, as those of pools.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.outside_suites.children import LAUNCHED, Children


class Suite(Children):
    """With processes that Lightning starts."""

    def asked(self, item: pytest.Item) -> str:
        """For how many processes a test asks."""
        return str(max([mark.kwargs.get("num_asked", 1) for mark in item.iter_markers("skipif")], default=1))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Where a test asks for several processes, Lightning starts the other ones as it finds this one to be started."""
        item.user_properties.append((LAUNCHED, self.asked(item)))
        sys.argv[1:] = ["-p", __name__, "-p", "no:cacheprovider", "-q", item.nodeid]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Lightning refuses threads that a test leaves behind, but of pools: an engine's end when it is garbage."""
        for thread in threading.enumerate():
            if thread.name.startswith(("infinity-", "swapper-", "zarr")):
                thread.name = f"ThreadPoolExecutor-{thread.name}"


def _without_gpus(reasons: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reasons)
    def found(min_cuda_gpus: int = 0, bf16_cuda: bool = False, standalone: bool = False, **others: Any) -> Any:
        why, marks = reasons(**others)
        return why, {**marks, "num_asked": max(min_cuda_gpus, 1)}

    return found


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest for ``-p``."""
    with mock.patch.dict(
        os.environ
    ):  # which say that a launcher started this process: Lightning is to start the others
        importlib.import_module("infinity.as_deepspeed")
    import lightning.fabric.accelerators.cuda
    import lightning.fabric.utilities.testing as of_fabric
    import lightning.pytorch.accelerators.cuda
    import lightning.pytorch.utilities.testing as of_pytorch

    for each in (of_fabric, of_pytorch):
        each._runif_reasons = _without_gpus(each._runif_reasons)
    for each in (lightning.fabric.accelerators.cuda, lightning.pytorch.accelerators.cuda):
        kind = each.CUDAAccelerator
        kind.is_available = staticmethod(lambda: True)
        kind.auto_device_count = staticmethod(lambda: 2)
        kind.parse_devices = staticmethod(lambda devices: list(range(devices)) if isinstance(devices, int) else devices)
        kind.get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", index) for index in devices])
        kind.setup_device = lambda self, device: None
    config.pluginmanager.register(Suite(), "lightning-suite")
