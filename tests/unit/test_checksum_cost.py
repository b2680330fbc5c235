"""The tool that measures what checksums cost."""

from __future__ import annotations

import pytest
from checksum_cost import main, measure


def test_it_prints_a_line_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mebibytes", "4", "--repetitions", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and lines[0].startswith("crc32c is computed by the processor")
    assert sum("64 KiB" in line and "<- used" in line for line in lines) == 2


def test_both_directions_are_measured() -> None:
    assert all(seconds > 0 for seconds in measure(4 << 20, 64 << 10, 1 << 20, 1))


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--mebibytes", "1"])
    assert "at least 4 MiB" in capsys.readouterr().err
