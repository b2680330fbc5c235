"""The command line."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from infinity.cli.profile import profile
from infinity.io_profile.arguments import Asked, ask

_MIB = 1 << 20


def parse(words: list[str]) -> Asked:
    return ask(**profile.make_context("profile", words).params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "0"], "more than 0"),
        (["--size", "-5"], "must be a size"),
        (["--size", "many"], "must be a size"),
        (["--size", "1MiB"], "too small"),
        (["--size", "900TB"], "are free"),
        (["--seconds", "0"], "above 0"),
        (["--seconds", "nan"], "above 0"),
        (["--seconds", "1e9"], "too long"),
        (["--repetitions", "0"], "whole number"),
        (["--repetitions", "1.5"], "whole number"),
        (["--pairs", "few"], "no number"),
        (["--request-sizes", "1MiB,,4MiB"], "must be a size"),
        (["--request-sizes", "4GiB"], "at most"),
        (["--in-flight", "-4"], "whole number"),
        (["--backends", "magic"], "is not one of"),
        (["--tokens-per-second", "inf"], "above 0"),
        (["--tbw", "0"], "above 0"),
        (["--tbw", "inf"], "terabytes"),
        (["--model", "nothing"], "neither"),
        (["--json", "/nowhere/at/all.json"], "is no directory"),
        (["--json", "/"], "is a directory"),
        (["--apply", "/nowhere.json"], "no such file"),
    ],
)
def test_bad_options_are_refused_in_words(tmp_path: Path, options: list[str], words: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parse([str(tmp_path), *options])
    message = caught.value.format_message()
    assert words in message
    assert options[0].removeprefix("--") in message or "free" in message or "such file" in message


def test_no_directory_is_an_error() -> None:
    with pytest.raises(click.UsageError) as caught:
        parse(["--quick"])
    assert "DIR" in caught.value.format_message()


def test_sizes_are_rounded_and_that_is_said(tmp_path: Path) -> None:
    options = ["--size", "400000001", "--request-sizes", "1000000,4MiB", "--in-flight", "6,8"]
    parsed = parse([str(tmp_path), *options])
    assert parsed.effort.file_bytes % 4096 == 0
    assert parsed.effort.file_bytes - 400000001 < 4096
    assert parsed.effort.request_sizes == (1003520, 4 * _MIB)
    assert parsed.effort.depths == (8,)
    for words in ("--size: 400000001 bytes", "--request-sizes: 1000000 bytes", "--in-flight"):
        assert any(words in remark for remark in parsed.remarks)


def test_ratings_are_terabytes(tmp_path: Path) -> None:
    for text, num_bytes in (("600", 600e12), ("0.6PB", 0.6e15), ("1200TB", 1.2e15)):
        assert parse([str(tmp_path), "--quick", "--tbw", text]).options.tbw == pytest.approx(num_bytes)


def test_pictures_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(click.UsageError, match="pip install"):
        parse([str(tmp_path), "--quick", "--png", str(tmp_path / "io.png")])
