# ruff: noqa: E402 - the version is checked before other imports, which an older library may fail
"""Lightning under its older name (``import pytorch_lightning``) on the engine: see `infinity.integrations.lightning`."""

from __future__ import annotations

import importlib

from infinity.integrations.versions import require

require("pytorch-lightning", "2.5", extra="lightning")

from infinity.integrations.lightning_strategy import strategy_for

InfinityStrategy = strategy_for(importlib.import_module("pytorch_lightning"))
"""See `infinity.integrations.lightning_strategy.InfinityStrategyMixin`."""
InfinityStrategy.__module__ = __name__
