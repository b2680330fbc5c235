"""The page of a run: whole, without network, and with all that it promises."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

from infinity.errors import CheckpointError, LibraryError
from infinity.metrics import Mark, Run, read_run
from infinity.reporting.page import render
from tests.unit.reporting.test_verdict import known, run_of, step

_VOID = {"meta", "link", "br", "img", "input", "hr"}


def _run(directory: Path) -> Run:
    run = run_of(known(0.1, 1e8), num_steps=30)
    run.directory = directory
    run.steps[7] = step(8, loss=float("nan"), lr=(), grad_norm=None)
    run.steps[9] = step(10, is_skipped=True, num_tokens=4096, device_peak_bytes=10**9)
    run.marks = [
        Mark("spike", 8, 1.7e9, "the loss is nan"),
        Mark("note", 12, 1.7e9, "<script>alert('no')</script> & so on"),
        Mark("restart", 12, 1.7e9, "started again from step 12"),
    ]
    return run


class _Tags(html.parser.HTMLParser):
    """Sees that every element is closed, that no id is there twice, and which addresses there are."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(_run(tmp_path_factory.mktemp("run")))


def test_the_page_is_whole_and_needs_nothing_else(page: str) -> None:
    tags = _Tags()
    tags.feed(page)
    assert tags.open == [] and len(set(tags.ids)) == len(tags.ids)
    assert all(address.startswith("#") for address in tags.addresses), "nothing is fetched"
    targets = {address[1:] for address in tags.addresses}
    assert targets <= set(tags.ids)
    assert "script" not in tags.tags and "&lt;script&gt;" in page
    assert not re.search(r"url\((?!#)|@import", page)
    assert not re.search(r"#0102[0-9a-f]{2}", page), "every colour is a name"
    assert len(page) < 1_000_000


def test_the_page_says_what_there_is(page: str) -> None:
    for words in (
        "Reads of the optimizer state bound this run",
        "Loss and learning rate",
        "Where a step&#39;s time went",
        "NVMe throughput",
        "started again from step 12",
        "10 (skipped)",
        "GPU memory, peak",
        "train_batch_size",
    ):
        assert words in page


@pytest.mark.deep
def test_a_run_without_steps_and_one_of_another_version_have_a_page(tmp_path: Path) -> None:
    assert "No step has ended yet" in render(Run(tmp_path))
    other = _run(tmp_path)
    other.plan = {"of": "another version"}
    assert "Reads bound this run" in render(other)
    assert "The plan" not in render(Run(tmp_path))


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        read_run(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(LibraryError, match=r"matplotlib is not installed.*'plot'"):
        render(_run(tmp_path))
