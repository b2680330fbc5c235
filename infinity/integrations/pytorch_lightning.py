"""Lightning under its older name (``import pytorch_lightning``) on the engine: see `infinity.integrations.lightning`."""

from __future__ import annotations

from infinity.integrations.lightning_strategy import strategy_for

InfinityStrategy = strategy_for("pytorch_lightning", library="pytorch-lightning", home=__name__)
"""See `infinity.integrations.lightning_strategy.InfinityStrategyMixin`."""
