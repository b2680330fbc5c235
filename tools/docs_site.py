"""Hooks of mkdocs for links to files outside docs/, and for pages that include such a file.

mkdocs knows docs/ alone. Pages also link to scripts and to README files beside the code. Each file that is linked to gets a page
in the site, below source/, and links lead there. `<!-- include ../../infinity/README.md -->` on a line of its own is replaced
by that file, without its title.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_DOCS = _ROOT / "docs"
# With the group, `split` keeps code blocks: every second part is code, in which nothing is rewritten.
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INCLUDE = re.compile(r"^<!-- include (\S+) -->$", re.MULTILINE)
_LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml", ".yml": "yaml"}
_AS_THEY_ARE = (".md", ".svg", ".png", ".ipynb")
_shown: set[str] = set()
"""Pages that `on_files` has made of other files: their links are right already."""


def linked(target: str, page: Path) -> Path | None:
    """Return the file of this repository that a link leads to; None for other links."""
    path = target.partition("#")[0]
    # "#anchor" stays on the page, and "https:" leaves the repository.
    if not path or ":" in path:
        return None
    found = (page.parent / path).resolve()
    # As GitHub shows a folder.
    found = found / "README.md" if found.is_dir() else found
    return found if found.is_file() and found.is_relative_to(_ROOT) else None


def place(file: Path) -> str:
    """Return the path of a file of this repository in the site."""
    if file.is_relative_to(_DOCS):
        return file.relative_to(_DOCS).as_posix()
    name = f"source/{file.relative_to(_ROOT).as_posix()}"
    name = name.replace("/.", "/")  # mkdocs leaves out names with a dot in front
    return name if file.suffix in _AS_THEY_ARE else f"{name}.md"


def links(page: Path) -> set[Path]:
    """Return the files outside docs/ that a page links to or includes."""
    text = page.read_text()
    targets = _LINK.findall(_CODE.sub("", text)) + _INCLUDE.findall(text)
    found = {linked(target, page) for target in targets}
    return {file for file in found if file is not None and not file.is_relative_to(_DOCS)}


def rewritten(text: str, page: Path, at: str) -> str:
    """Return the text of a page with links as they have to be at ``at`` in the site, and with its includes."""

    def link(found: re.Match[str]) -> str:
        file = linked(found[1], page)
        if file is None:
            return found[0]
        anchor = found[1].partition("#")[1:]
        return f"]({os.path.relpath(place(file), os.path.dirname(at) or '.')}{''.join(anchor)})"

    def include(found: re.Match[str]) -> str:
        file = (page.parent / found[1]).resolve()
        # Links in the included file are relative to it, and have to become relative to the page at `at`.
        return rewritten(file.read_text().partition("\n")[2], file, at)

    parts = _CODE.split(text)
    parts[::2] = [_INCLUDE.sub(include, _LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def content(file: Path) -> str:
    """The page about a file outside docs/."""
    text = file.read_text()
    if file.suffix == ".md":
        return rewritten(text, file, place(file))
    # Four backticks: a script may have three in a docstring.
    return f"# {file.relative_to(_ROOT).as_posix()}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file outside docs/ to which pages lead."""
    from mkdocs.structure.files import File

    # README files link to more files, so each new page is searched as well.
    waiting, seen = sorted(_DOCS.rglob("*.md")), set()
    while waiting:
        for file in sorted(links(waiting.pop()) - seen):
            seen.add(file)
            if file.suffix == ".md":
                waiting.append(file)
            if file.suffix in (".svg", ".png", ".ipynb"):
                files.append(File.generated(config, place(file), abs_src_path=str(file)))
            else:
                _shown.add(place(file))
                files.append(File.generated(config, place(file), content=content(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of the pages in docs/."""
    name = page.file.src_uri
    return markdown if name in _shown else rewritten(markdown, _DOCS / name, name)
