"""Several processes that train together: forked from one that has imported everything, and joined by gloo."""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import at their first use: once here, not in each process

from tests.forked import forked

_TIMEOUT = timedelta(seconds=500)
"""Nothing waits for as long, unless a test fails."""


class At(torch.autograd.Function):
    """Calls something in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], Any]) -> torch.Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.function()
        return gradient, None


def run_ranks(
    num: int, function: Callable[[int], Any], directory: Path, join: Callable[[int], None] | None = None
) -> list[str]:
    """Call ``function`` with the rank in each of ``num`` processes.

    ``join``: makes the process group, on the rank that it gets; None: by a file in ``directory``, on this machine.

    Returns:
        Of each process, the error that ended it, as text; empty without one.
    """

    def by_file(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        place = f"file://{directory}/store"
        torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=num, timeout=_TIMEOUT)
        torch.distributed.barrier()  # or one that ends at once ends the joining of the others

    children = [_fork(rank, num, function, directory, join or by_file) for rank in range(num)]
    try:
        for child in children.copy():
            os.waitpid(child, 0)
            children.remove(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    ends = [directory / f"rank{rank}" for rank in range(num)]
    return [end.read_text() if end.exists() else "it was killed" for end in ends]


def require_ranks(num: int, function: Callable[[int], Any], directory: Path) -> None:
    """As `run_ranks`, and no process may fail."""
    errors = run_ranks(num, function, directory)
    assert not any(errors), "\n".join(errors)


def on_ranks(num: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test is run with its ``rank`` in each of ``num`` processes; None: as many as its argument ``num`` says."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(tmp_path: Path, **arguments: Any) -> None:
            arguments["tmp_path"] = tmp_path
            require_ranks(num or arguments["num"], lambda rank: test(rank, **arguments), tmp_path)

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # what pytest gives it
        return run

    return decorate


def _fork(rank: int, num: int, function: Callable[[int], Any], directory: Path, join: Callable[[int], None]) -> int:
    def child() -> None:
        error = "it was killed"
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num)}
            torch.set_num_threads(1)
            join(rank)
            function(rank)
            error = ""
        except BaseException:
            error = traceback.format_exc()
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as Python does
        finally:
            (directory / f"rank{rank}").write_text(error)

    return forked(child)
