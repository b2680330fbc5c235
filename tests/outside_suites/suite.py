"""What a suite of another project is here, and what the outcome of one of its tests means: pure texts and rules.

A test that does not pass is *refused* if one of the suite's reasons explains it, *skipped* if the suite's own code skips it
here, and *failed* otherwise.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

RESULTS_VARIABLE = "OUTSIDE_SUITE_RESULTS"
"""The environment variable that names the file for the results, a line of JSON for each test."""
REASONS = {
    "private": "The test uses a private name of DeepSpeed, which does not exist here.",
    "inside": "The test looks at how DeepSpeed's engine is built: its partitions, buckets, hooks or classes.",
    "config": "The engine refuses a key of the config that would change results and is not supported.",
    "gpu": "The test needs a GPU.",
    "hub": "The test reads data of the Hugging Face Hub.",
    "works": "The test expects an error, and what it does works here.",
}
"""Why tests of several suites are refused; each suite's file has more."""


class Outcome(NamedTuple):
    """Of one test.

    Attributes:
        status: "passed", "failed", "refused" or "skipped".
        reason: one of the suite's reasons if it is refused, else the error or what the suite says.
        asked: for how many processes the test asks, "1,2" for both.
        run: with how many it was run; "0" if not at all.
    """

    status: str
    reason: str
    asked: str = "1"
    run: str = "1"


class Suite(NamedTuple):
    """Tests of another project.

    Attributes:
        name: of the folder here with the pytest plugin and the table.
        source: a repository that git clones.
        revision: a commit of it.
        of_messages: a pattern in an error, and why the test is refused.
        of_tests: a pattern in a test's name, and why it is refused where it fails.
        needs: packages that have to be installed besides, or some files cannot be imported.
        left_out: beginnings of the paths of files that do not concern this engine, each with a reason in `suite.toml`.
    """

    name: str
    source: str
    revision: str
    of_messages: tuple[tuple[str, str], ...]
    of_tests: tuple[tuple[str, str], ...]
    needs: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str) -> Suite:
        """The one of a folder, as its ``suite.toml`` says."""
        told = tomllib.loads((Path(__file__).parent / name / "suite.toml").read_text())
        reasons = REASONS | told["reasons"]
        patterns = {
            key: tuple((pattern, reasons[reason]) for pattern, reason in told[key])
            for key in ("of_messages", "of_tests")
        }
        left_out = tuple(path for paths in told.get("left_out", {}).values() for path in paths)
        return cls(name, told["source"], told["revision"], **patterns, needs=tuple(told["needs"]), left_out=left_out)

    @property
    def reasons(self) -> set[str]:
        """All reasons for which a test is refused."""
        return {reason for _, reason in self.of_messages + self.of_tests}

    @property
    def results(self) -> Path:
        """The table."""
        return Path(__file__).parent / self.name / "results.tsv"

    @property
    def files(self) -> list[str]:
        """Those that concern what this engine does, below the repository's folder ``tests``: each that the table has."""
        tests = (line.split("\t")[4] for line in self.results.read_text().splitlines()[1:])
        return list(dict.fromkeys(test.partition("::")[0] for test in tests))

    def forgotten(self, tests: Path) -> list[str]:
        """The files below ``tests`` that are neither in the table nor left out for a reason."""
        found = [path.relative_to(tests).as_posix() for path in sorted(tests.rglob("test_*.py"))]
        return [file for file in found if not file.startswith((*self.left_out, *self.files))]

    def judge(self, test: str, outcome: str, message: str) -> Outcome:
        """What pytest's ``outcome`` of a test with this error message means."""
        message = message.removeprefix("Failed: ")  # a rank's error, as pytest tells of it
        first = message.strip().partition("\n")[0].removeprefix("Skipped: ").strip()
        if outcome == "passed":
            return Outcome("passed", "")
        if outcome == "skipped" and "Error" not in first:  # else it skips because of what there is not here
            return Outcome("skipped", first)
        # Ranks that end of another one's error say nothing of the test.
        is_of_rank = re.match(r"(infinity\.errors\.)?RankError: .*(has ended|in time)", message) is not None
        if not is_of_rank:
            for pattern, reason in self.of_tests:
                if reason == REASONS["works"] and not re.search(
                    "DID NOT RAISE|Expected .*[Ee]rror|Error not raised", message
                ):
                    continue  # it fails with something else than the error that is missing
                if re.search(pattern, test):
                    return Outcome("refused", reason)
            for pattern, reason in self.of_messages:
                if re.search(pattern, message):
                    return Outcome("refused", reason)
        return Outcome("failed", " ".join(message.split())[:160])
