"""The page of a run: whole, without network, and shown by a real browser in light, dark and on a phone."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from infinity.errors import CheckpointError, LibraryError
from infinity.reporting.page import render, run_report
from infinity.reporting.trace import StepTrace, last_step
from infinity.run_log import Mark, Run
from tests.unit.reporting.test_verdict import known, run_of, step

_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_VOID = {"meta", "link", "br", "img", "input", "hr"}


def _run(directory: Path) -> Run:
    run = run_of(*known(0.1, 1e8), num_steps=30)
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
        "What rests where",
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
        run_report(tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(LibraryError, match=r"matplotlib is not installed.*'plot'"):
        render(_run(tmp_path))


@pytest.mark.deep
def test_the_last_step_of_a_trace(tmp_path: Path) -> None:
    names = [{"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}} for tid, name in _ROWS.items()]
    spans = [
        {"ph": "X", "name": name, "tid": tid, "ts": begin * 1e6, "dur": seconds * 1e6}
        for name, tid, begin, seconds in (
            ("step 1", 1, 0, 1),
            ("step 2", 1, 1, 2),
            ("forward", 2, 0.5, 1),
            ("backward", 2, 1.5, 1),
            ("w", 3, 0, 0.9),
            ("w", 3, 2.9, 1),
        )
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": names + spans}))
    found = last_step(path)
    assert found == StepTrace(2, 2.0, {"compute": [(0.0, 1.5)], "reads": [(pytest.approx(1.9), 2.0)]})
    run = _run(tmp_path)
    run.start["timeline"] = str(path)
    assert "Timeline of step 2" in render(run)
    for content in ("", "[]", '{"traceEvents": []}', '{"traceEvents": [1]}'):
        path.write_text(content)
        assert last_step(path) is None
    assert last_step(tmp_path / "missing") is None


_ROWS = {1: "steps", 2: "compute", 3: "reads"}

_PROBE = """<!doctype html><title>waits</title><iframe width=WIDTH height=800 srcdoc="PAGE"></iframe><script>
onload = () => setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const shown = [...page.querySelectorAll("svg")].filter(each => each.getBoundingClientRect().width > 0);
  const text = page.querySelector("svg text");
  document.body.textContent = "RESULT" + JSON.stringify({
    overflow: root.scrollWidth - root.clientWidth,
    background: getComputedStyle(page.body).backgroundColor,
    ink: getComputedStyle(page.querySelector("svg text")).fill,
    charts: shown.length, all: page.querySelectorAll("svg").length,
    lines: shown.filter(each => each.querySelector("path")).length,
    focusable: page.querySelectorAll("a[href], summary, [tabindex='0']").length,
  }) + "END";
}, 100);
</script>"""


@pytest.mark.parametrize(("width", "is_dark"), [(1100, False), (390, True)])
def test_a_browser_shows_it(page: str, tmp_path: Path, width: int, is_dark: bool) -> None:
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(_BROWSERS)} is installed")
    probe = tmp_path / "probe.html"
    inside = page.replace("&", "&amp;").replace('"', "&quot;")
    probe.write_text(_PROBE.replace("WIDTH", str(width)).replace("PAGE", inside))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/b",
    ]
    command += [f"--blink-settings=preferredColorScheme={int(not is_dark)}", "--virtual-time-budget=5000"]
    command += [f"--window-size={width + 60},900", "--dump-dom", probe.as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=560, check=True)
    assert "CONSOLE" not in answer.stderr, answer.stderr
    found = json.loads(answer.stdout.partition("RESULT")[2].partition("END")[0])
    assert found["overflow"] <= 0, "nothing has to be scrolled sideways"
    assert found["background"] == ("rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)")
    assert found["ink"] == ("rgb(230, 233, 238)" if is_dark else "rgb(27, 31, 36)")
    assert found["charts"] == found["lines"] == found["all"] / 2 == 5, "each chart once, in the width that fits"
    assert found["focusable"] >= 12
