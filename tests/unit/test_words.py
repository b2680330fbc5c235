"""Words that this project no longer uses: the field's have taken their place, see the table of words in infinity/README.md."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = "infinity", "swapper"

# Parts of identifiers: `_page_for` has the parts `page` and `for`.
_PARTS = {
    *("arena", "arenas", "glue", "lend", "lent", "pager", "patience", "residencies", "residency", "settle"),
    *("settled", "stretch", "stretches", "suitability", "tenant", "twin", "twins"),
}
# Whole identifiers, some with what is said instead.
_NAMES = re.compile(
    r"""
    note_\w+ | _note_\w+ | hand_over | hand_in | hand_out | handed_out | let_go\w* | _?give_back\w* | take_over | take_back
    | _?take_(first|copies|edges|own|item|arrival|weights|gradients|states|tiles) | give_(tiles|source)
    | turn_away | when_gone | tell | told_of | _tell\w* | stays_resident | shares_host_memory | has_halves | in_halves
    | Boundary | Kept | Refusal | LastingRefusal | SavedView | SavedThrough | Template | build_template | Worker | Piece\w*
    | Shares | \w*_shares | ShareUpdates | FreeShare | GradientShare | SharedForward | SharedStream | PageSizes | Page
    | Landing | Loan | Giver | Roll | Tenant | LeftOut | Trace | training_trace | eval_trace | end_sharing | token_for
    """,
    re.VERBOSE,
)
# Of torch, of Python, and of files that were written.
_ALLOWED = frozenset({"add_note", "page_bytes"})
_TEXTS = re.compile(r"\b(arenas?|glue|pagers?|residenc(y|ies)|twins?|lent|let go of|stretch by stretch)\b")
_PAGES = re.compile(rf"{_TEXTS.pattern}|infinity\.page_bytes|StagingArena")
_FILES = re.compile(
    r"(boundary|eligibility|glue|landing|page_sizes|pager|patience|piece|refusal|residency|rest_checks|settled_access|"
    r"shared_forward|shares|template|trace|worker)\.py"
)


def _identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each name that a module defines: classes, functions, arguments, attributes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def private_names(source: str) -> list[str]:
    """``line name`` of each identifier that is one of the old words, or has one of them among its parts."""
    old = {name for name in set(re.findall(r"[A-Za-z_]\w*", source)) if _is_old(name)}
    return [f"{line} {name}" for line, name in _identifiers(ast.parse(source)) if name in old] if old else []


@functools.cache
def _is_old(name: str) -> bool:
    parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
    return name not in _ALLOWED and bool(parts & _PARTS or _NAMES.fullmatch(name))


def private_texts(source: str) -> list[str]:
    """``line word`` of each old word in a comment or a string."""
    found: list[str] = []
    if _TEXTS.search(source) is None:
        return found
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            found += [f"{token.start[0]} {match.group()}" for match in _TEXTS.finditer(token.string)]
    return found


def _sources() -> list[Path]:
    return [path for package in _PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))]


def test_no_identifier_is_one_of_the_old_words() -> None:
    found = {str(path.relative_to(_ROOT)): private_names(path.read_text()) for path in _sources()}
    assert {path: names for path, names in found.items() if names} == {}


def test_no_comment_or_message_has_one_of_the_old_words() -> None:
    found = {str(path.relative_to(_ROOT)): private_texts(path.read_text()) for path in _sources()}
    assert {path: words for path, words in found.items() if words} == {}


def test_no_file_is_named_by_one_of_the_old_words() -> None:
    assert [str(path) for path in _sources() if _FILES.fullmatch(path.name)] == []


def _pages() -> list[Path]:
    folders = [path for folder in ("docs", *_PACKAGES) for path in (_ROOT / folder).rglob("*.md")]
    return sorted(path for path in (*_ROOT.glob("*.md"), *folders) if path.name != "CHANGELOG.md")


def test_no_page_has_one_of_the_old_words() -> None:
    lines = [(path, line) for path in _pages() for line in path.read_text().splitlines()]
    assert [f"{path.relative_to(_ROOT)}: {line}" for path, line in lines if _PAGES.search(line)] == []


def test_old_words_are_found() -> None:
    source = '''
class Pager:
    """The pager."""

    def note_step(self, page_bytes):
        self.arena = 1  # one arena
        self.add_note("lent")
'''
    assert private_names(source) == ["2 Pager", "5 note_step", "6 arena"]
    assert private_texts(source) == ["3 pager", "6 arena", "7 lent"]
