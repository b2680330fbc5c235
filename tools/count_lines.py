"""Counts lines of code: no blank lines, no comments, no docstrings, and no strings that describe attributes.

``python tools/count_lines.py [FOLDER ...] [--depth N]`` prints a line per package, then how long functions and files are.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_LONG_FUNCTION = 80
_LONG_FILE = 600


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            # A token may span lines: a long string counts all of its lines.
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string that is a statement: a docstring, or a text under an attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(source: str, lines: set[int]) -> Iterator[tuple[str, int]]:
    """Yield name and number of code lines of each function, those inside it included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Decorators are not in the range: `lineno` is the line of `def`.
            yield node.name, len(lines.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["infinity", "swapper", "tools"], help="where to count")
    parser.add_argument("--depth", type=int, default=2, help="how many folders deep a row of the table is")
    options = parser.parse_args()
    rows: Counter[str] = Counter()
    sizes, long_files = [], []
    for folder in options.folders:
        for path in sorted(Path(folder).rglob("*.py")):
            source = path.read_text()
            lines = code_lines(source)
            rows[str(Path(*path.parent.parts[: options.depth]))] += len(lines)
            sizes += [(size, f"{path}:{name}") for name, size in functions(source, lines)]
            if (total := source.count("\n")) > _LONG_FILE:
                long_files.append((total, str(path)))
    for name, count in sorted(rows.items()):
        print(f"{count:7,}  {name}")
    print(f"{rows.total():7,}  all")
    median = statistics.median(size for size, _ in sizes)
    print(f"\n{len(sizes):,} functions, median {median:g} lines of code, over {_LONG_FUNCTION}:")
    for size, name in sorted(item for item in sizes if item[0] > _LONG_FUNCTION):
        print(f"{size:7,}  {name}")
    print(f"files over {_LONG_FILE} lines, everything counted:")
    for total, name in sorted(long_files):
        print(f"{total:7,}  {name}")


if __name__ == "__main__":
    main()
