"""The table of a suite's outcomes, ``results.tsv``: cases of a test that share outcome and reason are one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from tests.outside_suites.suite import Outcome

_RANKS = {"passed": 0, "skipped": 1, "refused": 1, "failed": 2}
"""How bad an outcome is."""
_HEAD = "outcome\tcases\tasked\trun\ttest\treason"
_TEST = 4
"""The column with the test."""


def write(outcomes: Mapping[str, Outcome]) -> str:
    """The text of a table, from the outcome of each case."""
    cases: dict[str, dict[Outcome, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case, outcome in outcomes.items():
        cases[case.partition("[")[0]][outcome].append(case)
    rows = []
    for test, by_outcome in cases.items():
        for outcome, same in by_outcome.items():
            named = [(test, len(same))] if len(by_outcome) == 1 else [(case, 1) for case in same]
            status, reason, asked, run = outcome
            rows += [f"{status}\t{num}\t{asked}\t{run}\t{name}\t{reason}" for name, num in named]
    return _text(rows)


def _text(rows: Iterable[str]) -> str:
    return "\n".join([_HEAD, *sorted(rows, key=lambda row: row.split("\t")[_TEST])]) + "\n"


def merge(former: str, new: str, files: Collection[str]) -> str:
    """The lines of ``new``, and those of ``former`` that are of none of these files."""
    rows = [line for line in former.splitlines()[1:] if line.split("\t")[_TEST].partition("::")[0] not in files]
    return _text(rows + new.splitlines()[1:])


def read(text: str) -> dict[str, Outcome]:
    """The outcomes by name of a case, or of a test whose cases all have the same."""
    rows = (line.split("\t") for line in text.splitlines()[1:])
    return {test: Outcome(status, reason, asked, run) for status, _, asked, run, test, reason in rows}


def expected(known: Mapping[str, Outcome], case: str) -> Outcome | None:
    """What the table says about a case; None: nothing."""
    return known.get(case) or known.get(case.partition("[")[0])


def regressions(known: Mapping[str, Outcome], outcomes: Mapping[str, Outcome]) -> list[str]:
    """A sentence for each case that is worse than the table says, or of which it says nothing."""
    found = []
    for case, outcome in sorted(outcomes.items()):
        former = expected(known, case)
        if former is None:
            found.append(f"{case}: {outcome.status}, and not in the table")
        elif _RANKS[outcome.status] > _RANKS[former.status]:
            found.append(f"{case}: was {former.status}, now {outcome.status}: {outcome.reason}")
    return found


def summary(outcomes: Iterable[Outcome]) -> str:
    """How many cases there are of each kind, and the share that passes of those that the suite itself does not skip."""
    counts: dict[str, int] = defaultdict(int)
    several = 0
    for outcome in outcomes:
        counts[outcome.status] += 1
        several += outcome.status != "skipped" and outcome.run not in ("0", "1")
    run = counts["passed"] + counts["failed"] + counts["refused"]
    share = 100 * counts["passed"] / run if run else 0.0
    return (
        f"{run} cases, {several} of them on several processes: {counts['passed']} pass ({share:.1f} %), "
        f"{counts['failed']} fail, {counts['refused']} are refused; the suite itself skips {counts['skipped']} more"
    )
