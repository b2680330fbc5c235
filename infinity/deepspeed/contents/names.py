"""The tables of DeepSpeed's names: ``names.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""See the head of the file."""
