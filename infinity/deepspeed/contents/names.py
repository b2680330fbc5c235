"""The tables of DeepSpeed's names: ``names.toml``, and ``refused.toml`` with what is missing here, or differs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


TABLE = _table("names.toml")
"""See the head of the file."""
_TEXTS = _table("refused.toml")
REFUSED: dict[str, str] = {name: each["because"] for each in _TEXTS["refused"] for name in each["names"]}
"""Name with dots, of a module or a name in one -> why it is missing here, and what to use instead."""
DIFFERS: dict[str, str] = {name: each["how"] for each in _TEXTS["differs"] for name in each["names"]}
"""Name that exists here, without its module -> how it differs from DeepSpeed's."""
