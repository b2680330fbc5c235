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
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
_SECONDS = 900
"""The most that one mutation may take in a tier."""
_SWAPPED: dict[type[ast.AST], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.And: "or", ast.Or: "and"},
}


class Mutation(NamedTuple):
    """Attributes:
    path: of the file, relative to the root.
    begin, end: what is replaced, in bytes of the file.
    tests: names of the tests that execute the line.
    """

    path: str
    line: int
    begin: int
    end: int
    instead: str
    tests: list[str]


def draw(coverage: Path, seed: int, count: int) -> Iterator[Mutation]:
    """``count`` lines, each with one mutation that applies to it."""
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
        whole = (ROOT / path).read_bytes()
        if found := [change for change in _mutations_of(whole, line) if _is_python(_changed(whole, *change))]:
            count -= 1
            yield Mutation(path, line, *rng.choice(found), tests[path, line])


def _changed(source: bytes, begin: int, end: int, instead: str) -> bytes:
    return source[:begin] + instead.encode() + source[end:]


def _is_python(source: bytes) -> bool:
    """Whether it can be parsed: Python 3.11 gives wrong places for what is inside of an f-string."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _mutations_of(source: bytes, line: int) -> Iterator[tuple[int, int, str]]:
    """What can be replaced in a line, and by what: (begin, end, instead)."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))

    def begin(node: ast.expr | ast.stmt) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr | ast.stmt) -> int:
        return starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

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


def _failing(tree: Path, arguments: list[str]) -> str:
    """The first test that fails; empty if all pass."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(arguments))
        listed.flush()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=180", f"@{listed.name}"]
        try:
            done = subprocess.run(
                command,
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},  # for processes that a test starts
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return "(no end)"
    if done.returncode in (0, 5):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"(exit code {done.returncode})"


def main(coverage: Path, seed: int, count: int, table: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".coverage*")
        )
        for mutation in draw(coverage, seed, count):
            began = time.monotonic()
            whole = (ROOT / mutation.path).read_bytes()
            old = whole[mutation.begin : mutation.end].decode()
            (tree / mutation.path).write_bytes(_changed(whole, mutation.begin, mutation.end, mutation.instead))
            # Ranks are forked processes, so no test of theirs is named.
            tier, dies = "quick", _failing(tree, mutation.tests) or _failing(tree, ["tests/distributed"])
            if not dies:
                files = sorted({name.partition("::")[0] for name in mutation.tests})
                tier, dies = "all", _failing(tree, ["--all", *files])
            (tree / mutation.path).write_bytes(whole)
            seconds = round(time.monotonic() - began)
            row = (
                mutation.path,
                mutation.line,
                old,
                mutation.instead,
                len(mutation.tests),
                tier if dies else "survives",
                dies,
            )
            with table.open("a") as file:
                file.write("\t".join(" ".join(str(value).split()) for value in (*row, seconds)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
