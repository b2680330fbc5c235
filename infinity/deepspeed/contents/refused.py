"""What of DeepSpeed's public names is not here, and what is another thing here: ``refused.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

REFUSED: dict[str, str] = {name: each["because"] for each in _TEXTS["refused"] for name in each["names"]}
"""Name with dots, of a module or of what is in one -> why there is nothing of that name below it, and the nearest thing."""
DIFFERS: dict[str, str] = {name: each["how"] for each in _TEXTS["differs"] for name in each["names"]}
"""Name of what is there, without its module -> how it differs from DeepSpeed's."""
