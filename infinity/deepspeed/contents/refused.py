"""DeepSpeed's public names that are missing here, or differ: ``refused.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

REFUSED: dict[str, str] = {name: each["because"] for each in _TEXTS["refused"] for name in each["names"]}
"""Name with dots, of a module or a name in one -> why it is missing here, and what to use instead."""
DIFFERS: dict[str, str] = {name: each["how"] for each in _TEXTS["differs"] for name in each["names"]}
"""Name that exists here, without its module -> how it differs from DeepSpeed's."""
