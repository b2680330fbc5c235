"""Lightning (``import lightning``) on the engine: ``Trainer(strategy="infinity_stage_3_nvme")``, or `InfinityStrategy`."""

from __future__ import annotations

from infinity.integrations.lightning_strategy import strategy_for

InfinityStrategy = strategy_for("lightning.pytorch", library="lightning", home=__name__)
"""See `infinity.integrations.lightning_strategy.InfinityStrategyMixin`."""
