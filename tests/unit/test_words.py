"""Words that this project no longer uses: the field's have taken their place, see the table of words in infinity/README.md."""

from __future__ import annotations

import re
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
_DEFINED = re.compile(
    r"(?:class|def) (\w+)|^\s*(?:self\.)?(\w+)(?:: [^=\n]+)? = |[(,]\s*(\w+): |^\s+(\w+): \S", re.MULTILINE
)
"""Classes, functions, variables, attributes and arguments."""
_TEXTS = re.compile(r"\b(arenas?|glue|pagers?|residenc(?:y|ies)|twins?|lent|let go of|stretch by stretch)\b")
_PAGES = re.compile(rf"{_TEXTS.pattern}|infinity\.page_bytes|StagingArena")
_FILES = re.compile(
    r"(boundary|eligibility|glue|landing|page_sizes|pager|patience|piece|refusal|residency|rest_checks|settled_access|"
    r"shared_forward|shares|template|trace|worker)\.py"
)


def private_names(source: str) -> set[str]:
    """The identifiers that are one of the old words, or have one of them among their parts."""
    names = {name for match in _DEFINED.finditer(source) for name in match.groups() if name} - _ALLOWED
    return {name for name in names if _parts(name) & _PARTS or _NAMES.fullmatch(name)}


def _parts(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def _sources() -> list[Path]:
    return [path for package in _PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))]


def test_no_file_uses_one_of_the_old_words() -> None:
    """Neither by its name, nor in an identifier, a comment or a message."""
    found = {
        path: private_names(text) | set(_TEXTS.findall(text)) for path in _sources() for text in [path.read_text()]
    }
    assert {str(path): words for path, words in found.items() if words or _FILES.fullmatch(path.name)} == {}


def test_no_page_has_one_of_the_old_words() -> None:
    folders = [path for folder in ("docs", *_PACKAGES) for path in (_ROOT / folder).rglob("*.md")]
    lines = [(path, line) for path in (*_ROOT.glob("*.md"), *folders) for line in path.read_text().splitlines()]
    found = [f"{path}: {line}" for path, line in lines if _PAGES.search(line) and path.name != "CHANGELOG.md"]
    assert found == []


def test_old_words_are_found() -> None:
    source = """
class Pager:
    def note_step(self, page_bytes: int, lent: bool) -> None:
        self.arena = 1
        self.add_note("of somebody else")
"""
    assert private_names(source) == {"Pager", "note_step", "lent", "arena"}
    assert _TEXTS.search("# one arena")
