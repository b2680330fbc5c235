"""What `bench_step.py` refuses before it measures anything."""

from __future__ import annotations

from pathlib import Path

import bench_step
import pytest


def _refuse(options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_step.main(options)


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (["--micro-batches", "1,many"], "such as 1,3"),
        (["--micro-batches", "0"], "such as 1,3"),
        (["--clip", "-1"], "such as 0,1"),
        (["--checkpointing", "some"], "none,reentrant,non-reentrant"),
        (["--budget", "12 parsecs"], "such as 384MB,2GB"),
        (["--set", "update"], "such as update=deferred"),
        (["--throttle", "fast"], "such as 300,600,none"),
        (["--throttle", "none", "--peer", "deepspeed", "--peer-python", "no-such-python"], "name another with"),
    ],
    ids=str,
)
def test_what_cannot_be_measured(
    options: list[str], cure: str, nvme_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nvme_dir)
    _refuse(options)
    told = capsys.readouterr().err
    assert cure in told
    assert list(nvme_dir.iterdir()) == []
