"""Changes a line of the packages at a time, and sees whether a test that executes it fails.

    python -m pytest --cov --cov-context=test       # once, with pytest-cov: which test executes what
    python -m tests.mutation_run .coverage SEED COUNT TABLE

Lines are drawn with a seed among those that a test executes. Each mutation is tried in a copy of the tree, first against the
quick tests that execute the line, then against the deep tests of the same files; the first failure ends it. ``TABLE`` is a
file of tab-separated values that gets a row for each. Lines that only forked processes execute are not drawn: their coverage
names no test. So the tests of several ranks are tried for each line.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from coverage import CoverageData

from tests.mutating import ROOT, Mutation, Places, copied_tree, first_failure

_SECONDS = 900
"""The most that one mutation may take in a tier."""
_SWAPPED: dict[type[ast.AST], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.And: "or", ast.Or: "and"},
}


def draw(coverage: Path, seed: int, count: int) -> Iterator[tuple[Mutation, list[str]]]:
    """``count`` lines, each with one mutation that applies to it, and the tests that execute it."""
    data = CoverageData(str(coverage))
    data.read()
    measured = {re.sub(r".*/(?=(infinity|swapper)/)", "", path): path for path in data.measured_files()}
    tests: dict[tuple[str, int], list[str]] = {}
    for path in sorted(path for path in measured if path.endswith(".py")):  # jinja's templates are measured as well
        for line, contexts in data.contexts_by_lineno(measured[path]).items():
            if names := sorted({context.partition("|")[0] for context in contexts} - {""}):
                tests[path, line] = names
    rng = random.Random(seed)
    lines = sorted(tests)
    rng.shuffle(lines)
    for path, line in lines:
        if count == 0:
            return
        if found := [each for each in _mutations_of(path, line) if _is_python(each.changed())]:
            count -= 1
            yield rng.choice(found), tests[path, line]


def _is_python(source: bytes) -> bool:
    """Whether it can be parsed: Python 3.11 gives wrong places for what is inside of an f-string."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _mutations_of(path: str, line: int) -> Iterator[Mutation]:
    """What can be replaced in a line, and by what."""
    source = (ROOT / path).read_bytes()
    for begin, end, instead in _replaced(source, line):
        yield Mutation(path, line, begin, end, instead)


def _replaced(source: bytes, line: int) -> Iterator[tuple[int, int, str]]:
    places = Places(source)
    begin, end = places.begin, places.end

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[tuple[int, int, str]]:
        if type(operator) in _SWAPPED:
            old = source[end(left) : begin(right)].decode()
            word = re.search(r"not in|is not|\w+|[^\w\s()]+", old)
            assert word is not None
            yield end(left), begin(right), old[: word.start()] + _SWAPPED[type(operator)] + old[word.end() :]

    for node in ast.walk(ast.parse(source)):
        if getattr(node, "lineno", None) != line:
            continue
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, operator)
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between(left, right, operator)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, operator)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield begin(node), end(node), source[begin(operand) : end(operand)].decode()
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield begin(test), end(test), f"not ({source[begin(test) : end(test)].decode()})"
            case ast.Constant(value=bool(value)):
                yield begin(node), end(node), str(not value)
            case ast.Constant(value=int(value)):
                yield begin(node), end(node), str(value + 1)
            case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
                yield begin(value), end(value), "None"
            case ast.Expr(value=ast.Call() as call):
                yield begin(call), end(call), "None"
            case ast.AugAssign():
                yield begin(node), end(node), "pass"


def main(coverage: Path, seed: int, count: int, table: Path) -> None:
    with copied_tree() as tree:
        for mutation, tests in draw(coverage, seed, count):
            began = time.monotonic()
            attempts = (
                ("quick", tests),
                ("quick", ["tests/distributed"]),  # ranks are forked processes, so no test of theirs is named
                ("all", ["--all", *sorted({name.partition("::")[0] for name in tests})]),
            )
            with mutation.applied(tree):
                failures = ((tier, first_failure(tree, arguments, seconds=_SECONDS)) for tier, arguments in attempts)
                tier, dies = next((each for each in failures if each[1]), ("survives", ""))
            what = mutation.path, mutation.line, mutation.old, mutation.instead, len(tests)
            row = *what, tier, dies, round(time.monotonic() - began)
            with table.open("a") as file:
                file.write("\t".join(" ".join(str(value).split()) for value in row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
