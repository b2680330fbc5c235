"""Mutations: a piece of a file replaced in a copy of the tree, on which tests then run."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """Attributes:
    path: of the file, relative to the root.
    begin, end: what is replaced, in bytes of the file.
    """

    path: str
    line: int
    begin: int
    end: int
    instead: str

    @property
    def old(self) -> str:
        return (ROOT / self.path).read_bytes()[self.begin : self.end].decode()

    def changed(self) -> bytes:
        """The whole file with it."""
        source = (ROOT / self.path).read_bytes()
        return source[: self.begin] + self.instead.encode() + source[self.end :]

    @contextlib.contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Inside the ``with`` block, a copy of the tree has it."""
        (tree / self.path).write_bytes(self.changed())
        try:
            yield
        finally:
            shutil.copy(ROOT / self.path, tree / self.path)


class Places:
    """Where the nodes of a source begin and end, in its bytes."""

    def __init__(self, source: bytes) -> None:
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def begin(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of what packages and tests need."""
    ignored = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".coverage*")
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(shutil.copytree(ROOT, Path(scratch, "tree"), ignore=ignored))


def first_failure(tree: Path, arguments: Iterable[str], *, seconds: int, timeout: int = 180) -> str:
    """The first test that fails on a copy of the tree; empty if all pass.

    Args:
        arguments: of pytest, one or more.
        seconds, timeout: the most that all tests, and one of them, may take.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(arguments))
        listed.flush()
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={timeout}"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, f"@{listed.name}"],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},  # for processes that a test starts
                capture_output=True,
                text=True,
                timeout=seconds,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return "(no end)"
    if done.returncode in (0, 5):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"(exit code {done.returncode})"
