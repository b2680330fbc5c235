"""Takes away one wait, fence or mark of the way to a GPU at a time, and sees whether a test fails.

``python -m tests.simulated_gpu.mutations``: a table of all of them, or of those in files whose paths contain one of its
arguments, and exit code 1 if the tests let one pass. It works on a copy of the tree and takes a minute for each. What trains
there has 1, 2, 3 and 5 update workers.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ("tests/simulated_gpu", "tests/unit/tiers", "tests/unit/updates", "tests/unit/device")
_INSTEAD = {"mark": "None", "compute_waits_for": "None", "is_done": "True"}
_ARGUMENT_ALONE = ("synchronize",)
_EQUIVALENT = {
    (
        "infinity/tiers/weight_store.py",
        "self._device.is_done(self._copying[0][1])",
    ): "who takes a page back waits for its copy"
}
"""(path, what is replaced) -> why it changes nothing but who waits when."""
_WITH_AFTER = ("upload", "download")
_RECEIVERS = ("device", "pool")


@dataclass(frozen=True)
class Mutation:
    """Attributes:
    path: of the file, relative to the root.
    begin, end: what is replaced, in characters.
    """

    path: str
    line: int
    what: str
    begin: int
    end: int
    instead: str


def mutations() -> list[Mutation]:
    """Each call in the package that orders copies and kernels, replaced by what orders nothing."""
    found: list[Mutation] = []
    for path in sorted((ROOT / "infinity").rglob("*.py")):
        if path.name == "compute.py" and path.parent.name == "device":
            continue  # a real GPU's are there, which nothing here runs
        source = path.read_text()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.walk(ast.parse(source)):
            found += (
                Mutation(
                    str(path.relative_to(ROOT)),
                    place.lineno,
                    ast.unparse(node),
                    _offset(source, starts, place.lineno, place.col_offset),
                    _offset(source, starts, place.end_lineno or 0, place.end_col_offset or 0),
                    instead,
                )
                for place, instead in _replaced(node)
            )
    return found


def _offset(source: str, starts: list[int], line: int, column: int) -> int:
    text = source[starts[line - 1] : starts[line]]
    return starts[line - 1] + len(text.encode()[:column].decode())


def _replaced(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    receiver = ast.unparse(node.func.value).rsplit(".", 1)[-1].lstrip("_")
    if receiver not in _RECEIVERS:
        return
    if node.func.attr in _INSTEAD:
        yield node, _INSTEAD[node.func.attr]
    if node.func.attr in _ARGUMENT_ALONE:
        yield node, f"({ast.unparse(node.args[0])})"
    if node.func.attr in _WITH_AFTER and len(node.args) == 3 and not isinstance(node.args[2], ast.Call):
        yield node.args[2], "None"


def survives(mutation: Mutation, tree: Path) -> bool:
    """Whether all tests pass on a copy of the tree with it."""
    path = tree / mutation.path
    source = path.read_text()
    path.write_text(source[: mutation.begin] + mutation.instead + source[mutation.end :])
    try:
        module = Path(mutation.path)
        nearest = sorted((tree / "tests/unit" / module.parent.name).glob(f"test_{module.stem}*.py"))
        return passes(tree, map(str, nearest)) and passes(tree)
    finally:
        path.write_text(source)


def passes(tree: Path, tests: Iterable[str] = TESTS) -> bool:
    """Whether tests pass on a copy of the tree, if there are any."""
    given = list(tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "300", *given]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return (
        not given
        or subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False).returncode == 0
    )


def main() -> int:
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for folder in ("infinity", "swapper", "tests", "tools", "configs"):
            shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        if not passes(tree):  # then it would seem that all mutations fail
            print(f"the tests do not pass without any: pytest {' '.join(TESTS)}")
            return 1
        chosen = [each for each in mutations() if not sys.argv[1:] or any(name in each.path for name in sys.argv[1:])]
        for mutation in chosen:
            reason = _EQUIVALENT.get((mutation.path, mutation.what))
            if reason is not None:
                print(f"{'equivalent':13} {mutation.path}:{mutation.line} {mutation.what}: {reason}", flush=True)
                continue
            lives = survives(mutation, tree)
            survivors += lives
            verdict = "SURVIVES" if lives else "fails a test"
            print(f"{verdict:13} {mutation.path}:{mutation.line} {mutation.what} -> {mutation.instead}", flush=True)
    print(f"{survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
