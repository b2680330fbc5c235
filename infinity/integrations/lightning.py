# ruff: noqa: E402 - the version is checked before other imports, which an older library may fail
"""Lightning (``import lightning``) on the engine: ``Trainer(strategy="infinity_stage_3_nvme")``, or `InfinityStrategy`."""

from __future__ import annotations

import importlib

from infinity.integrations.versions import require

require("lightning", "2.5", extra="lightning")

from infinity.integrations.lightning_strategy import strategy_for

InfinityStrategy = strategy_for(importlib.import_module("lightning.pytorch"))
"""See `infinity.integrations.lightning_strategy.InfinityStrategyMixin`."""
InfinityStrategy.__module__ = __name__
