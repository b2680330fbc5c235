"""Takes away one wait, fence or mark of the way to a GPU at a time, and sees whether a test fails.

``python -m tests.simulated_gpu.mutations``: a table of all of them, or of those in files whose paths contain one of its
arguments, and exit code 1 if the tests let one pass. It works on a copy of the tree and takes a minute for each. What trains
there has 1, 2, 3 and 5 update workers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.mutating import ROOT, Mutation, Places, copied_tree, first_failure

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


def mutations() -> list[tuple[Mutation, str]]:
    """Each call in the package that orders copies and kernels, replaced by what orders nothing; and the call itself."""
    found: list[tuple[Mutation, str]] = []
    for path in sorted((ROOT / "infinity").rglob("*.py")):
        if path.name == "compute.py" and path.parent.name == "device":
            continue  # a real GPU's are there, which nothing here runs
        source, name = path.read_bytes(), str(path.relative_to(ROOT))
        places = Places(source)
        for node in ast.walk(ast.parse(source)):
            for place, instead in _replaced(node):
                change = Mutation(name, place.lineno, places.begin(place), places.end(place), instead)
                found.append((change, ast.unparse(node)))
    return found


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
    module = Path(mutation.path)
    nearest = sorted((tree / "tests/unit" / module.parent.name).glob(f"test_{module.stem}*.py"))
    with mutation.applied(tree):
        return (not nearest or passes(tree, map(str, nearest))) and passes(tree)


def passes(tree: Path, tests: Iterable[str] = TESTS) -> bool:
    return not first_failure(tree, tests, seconds=3600, timeout=300)


def main() -> int:
    survivors = 0
    with copied_tree() as tree:
        if not passes(tree):  # then it would seem that all mutations fail
            print(f"the tests do not pass without any: pytest {' '.join(TESTS)}")
            return 1
        for mutation, what in mutations():
            if sys.argv[1:] and not any(name in mutation.path for name in sys.argv[1:]):
                continue
            place, reason = f"{mutation.path}:{mutation.line} {what}", _EQUIVALENT.get((mutation.path, what))
            if reason is not None:
                print(f"{'equivalent':13} {place}: {reason}", flush=True)
                continue
            lives = survives(mutation, tree)
            survivors += lives
            print(f"{'SURVIVES' if lives else 'fails a test':13} {place} -> {mutation.instead}", flush=True)
    print(f"{survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
