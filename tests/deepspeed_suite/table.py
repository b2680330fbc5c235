"""The table of outcomes, ``results.tsv``: cases of a test that share outcome and reason are one line.

Knows lines only; must not know how tests are run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tests.deepspeed_suite.suite import Outcome

RESULTS = Path(__file__).with_name("results.tsv")
_HEAD = "outcome\tcases\ttest\treason"


def write(outcomes: Mapping[str, Outcome]) -> str:
    """The text of a table, from the outcome of each case."""
    cases: dict[str, dict[Outcome, list[str]]] = defaultdict(lambda: defaultdict(list))
    for case, outcome in outcomes.items():
        cases[case.partition("[")[0]][outcome].append(case)
    rows = []
    for test, by_outcome in cases.items():
        for outcome, same in by_outcome.items():
            named = [(test, len(same))] if len(by_outcome) == 1 else [(case, 1) for case in same]
            rows += [f"{outcome.status}\t{num}\t{name}\t{outcome.reason}" for name, num in named]
    return _text(rows)


def _text(rows: Iterable[str]) -> str:
    return "\n".join([_HEAD, *sorted(rows, key=lambda row: row.split("\t")[2])]) + "\n"


def merge(former: str, new: str, files: Collection[str]) -> str:
    """The lines of ``new``, and those of ``former`` that are of none of these files."""
    rows = [line for line in former.splitlines()[1:] if line.split("\t")[2].partition("::")[0] not in files]
    return _text(rows + new.splitlines()[1:])


def read(text: str) -> dict[str, Outcome]:
    """The outcomes by name of a case, or of a test whose cases all have the same."""
    rows = (line.split("\t") for line in text.splitlines()[1:])
    return {test: Outcome(status, reason) for status, _, test, reason in rows}


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
        elif former.status == "passed" != outcome.status or (former.status, outcome.status) == (
            "not applicable",
            "failed",
        ):
            found.append(f"{case}: was {former.status}, now {outcome.status}: {outcome.reason}")
    return found


def summary(outcomes: Iterable[Outcome]) -> str:
    """How many cases there are of each kind, and the share that passes of those that apply."""
    counts: dict[str, int] = defaultdict(int)
    for outcome in outcomes:
        counts[outcome.status] += 1
    applicable = counts["passed"] + counts["failed"]
    share = 100 * counts["passed"] / applicable if applicable else 0.0
    return (
        f"{applicable} cases apply, {counts['passed']} pass ({share:.1f} %), {counts['failed']} fail; "
        f"{counts['not applicable']} do not apply"
    )
