"""What the plugins of all suites share: each test runs in a child of pytest's process, and its outcome is one line of a file."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import NoReturn

import _pytest.runner
import pytest

from tests.outside_suites.suite import RESULTS_VARIABLE

LIMIT_SECONDS = 600.0
"""Of the ranks of a test; the test itself has as much again."""
LAUNCHED = "launched"
"""A test's property: with how many processes it was run."""


class Children:
    """The plugin itself."""

    def asked(self, item: pytest.Item) -> str:
        """For how many processes a test asks."""
        return "1"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run the test in a child, and take over its reports."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = _in_child(item)
        _note(item, reports, self.asked(item))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """The suite's own settings leave some out."""
        for item in items:
            _write([item.nodeid, "skipped", "Skipped: the suite's pytest.ini leaves it out", self.asked(item), "0"])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failed case, or a skipped one."""
        if report.outcome != "passed":
            _write([report.nodeid, report.outcome, f"It cannot be imported: {_message_of(report)}", "0", "0"])


def _note(item: pytest.Item, reports: Sequence[pytest.TestReport], asked: str) -> None:
    outcome, message = "passed", ""
    for report in reports:
        if report.outcome != "passed":
            outcome, message = report.outcome, _message_of(report)
            break
    launched = [used for report in reports for name, used in report.user_properties if name == LAUNCHED]
    used = launched[-1] if launched else "0" if outcome == "skipped" or asked != "1" else "1"
    _write([item.nodeid, outcome, message, asked, used])


def _write(row: Sequence[str]) -> None:
    path = os.environ.get(RESULTS_VARIABLE)
    if path is not None:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def _message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The last line of an error, as Python would print it."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr).strip().rpartition("\nE ")[2] if crash is None else str(crash.message)


def _in_child(item: pytest.Item) -> list[pytest.TestReport]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_and_exit(item, writer)
    os.close(writer)
    try:
        said = _read_all(reader, time.monotonic() + 2 * LIMIT_SECONDS)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if said is None:
        return [_failed(item, f"no answer in {2 * LIMIT_SECONDS:.0f} seconds")]
    if not said:
        return [_failed(item, f"its process died with {os.waitstatus_to_exitcode(status)}")]
    reports = [
        item.config.hook.pytest_report_from_serializable(config=item.config, data=data) for data in json.loads(said)
    ]
    for report in reports:
        if isinstance(report.longrepr, list):  # a skip's, which JSON has no tuples for
            report.longrepr = tuple(report.longrepr)
    return reports


def _run_and_exit(item: pytest.Item, writer: int) -> NoReturn:
    try:
        reports = _pytest.runner.runtestprotocol(item, nextitem=None, log=False)
        hook = item.config.hook
        data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
        with os.fdopen(writer, "w") as file:
            json.dump(data, file)
    finally:
        os._exit(0)


def _read_all(reader: int, deadline: float) -> bytes | None:
    said = b""
    while select.select([reader], [], [], max(deadline - time.monotonic(), 0))[0]:
        more = os.read(reader, 1 << 20)
        if not more:
            return said
        said += more
    return None


def _failed(item: pytest.Item, what: str) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "call")
