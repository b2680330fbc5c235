"""Other processes: killed ones leave nothing, and forked children harm nobody."""

from __future__ import annotations

import gc
import os
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swapper import ALIGNMENT, StagingPool, Swapper, SwapperClosedError, SwapperConfig
from tests.children import run_python
from tests.forked import require_in_child
from tests.uring import needs_uring

_CONFIG = SwapperConfig(deadline_seconds=20.0)


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["threads", "aiofiles", pytest.param("uring", marks=needs_uring)])
@pytest.mark.parametrize(
    ("ending", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("raise SystemExit(4)", 4), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -6)],
)
def test_any_other_end_leaves_nothing_and_is_quiet(tmp_path: Path, ending: str, code: int, backend: str) -> None:
    done = run_python(
        "-c",
        textwrap.dedent(f"""
        import os, sys, numpy
        from swapper import StagingPool, Swapper, SwapperConfig
        swapper = Swapper.open([sys.argv[1]], 8 << 20, SwapperConfig(backend={backend!r}))
        staging_pool = StagingPool(1 << 20, 2)
        staging_buffer = staging_pool.lease()
        extent = swapper.allocate(8 << 20, "x")
        handle = swapper.write(extent, numpy.ones(8 << 20, dtype=numpy.uint8))
        {ending}
        """),
        tmp_path,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.deep
def test_work_that_is_asked_for_while_the_process_ends_is_refused_at_once(tmp_path: Path) -> None:
    done = run_python(
        "-c",
        textwrap.dedent("""
        import atexit, sys, time, numpy

        def late():  # registered before the swapper is imported, so called after its threads have ended
            started = time.monotonic()
            try:
                swapper.write(extent, data).wait()
            except swapper_module.TransferError as error:
                print(error.errno, time.monotonic() - started < 30)

        atexit.register(late)
        import swapper as swapper_module
        swapper = swapper_module.Swapper.open([sys.argv[1]], 8 << 20)
        extent = swapper.allocate(8 << 20, "x")
        data = numpy.ones(8 << 20, dtype=numpy.uint8)
        swapper.write(extent, data)
        sys.exit(5)
        """),
        tmp_path,
    )
    assert (done.returncode, done.stdout.split()) == (5, ["108", "True"]), done.stderr


def test_a_forked_child_is_refused_in_words_and_harms_nobody(tmp_path: Path) -> None:
    swapper = Swapper.open([tmp_path], 1 << 20, _CONFIG)
    staging_pool = StagingPool(ALIGNMENT, 4)
    with swapper, staging_pool:
        extent = swapper.allocate(ALIGNMENT, "x")
        staging_buffer = staging_pool.lease()
        staging_buffer.tensor.fill_(5)
        handle = swapper.write(extent, staging_buffer.tensor)
        fd = swapper.backend.volume.files[0].fd  # type: ignore[attr-defined]

        def child() -> bool:
            for use in (
                lambda: swapper.read(extent, bytearray(1)),
                lambda: swapper.allocate(1, "y"),
                swapper.flush,
                lambda: swapper.free(extent),
                swapper.statistics,
                staging_pool.lease,
                staging_pool.try_lease,
                lambda: staging_buffer.tensor,
            ):
                try:
                    use()
                    return False
                except SwapperClosedError as error:
                    if "belongs to process" not in str(error):
                        return False
            swapper.close()
            try:
                os.fstat(fd)
                return False  # a child that lives on would keep the space of the parent occupied
            except OSError:
                pass
            own = Swapper.in_memory(1 << 20)
            mine = own.allocate(1, "mine")
            own.write(mine, bytearray(b"z")).wait()
            own.close()
            gc.collect()
            return True

        require_in_child(child)
        handle.wait()
        copy = torch.zeros(ALIGNMENT, dtype=torch.uint8)
        swapper.read(extent, copy).wait()
        assert (copy == 5).all() and (staging_buffer.tensor == 5).all()
        staging_buffer.release()


def test_a_forked_child_waits_for_no_request_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, real = threading.Event(), os.pwritev

    def pwritev(*arguments: Any) -> int:
        may_go.wait(60)
        return real(*arguments)

    with Swapper.open([tmp_path], 1 << 20, SwapperConfig(backend="threads")) as swapper:
        monkeypatch.setattr(os, "pwritev", pwritev)
        handle = swapper.write(swapper.allocate(ALIGNMENT, "x"), np.ones(ALIGNMENT, dtype=np.uint8))

        def child() -> bool:
            for use in (handle.wait, handle.promote, lambda: handle.add_done_callback(print)):
                with pytest.raises(SwapperClosedError, match="belongs to process"):
                    use()
            return True

        try:
            require_in_child(child)
        finally:
            may_go.set()
        handle.wait()
