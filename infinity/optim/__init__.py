"""Optimizers whose state lies outside memory: what is known of their rules, and how a rule runs on slices of parameters.

A `WrappedOptimizer` holds the hyperparameters that users and learning rate schedulers see. A `SliceUpdater` runs the same
optimizer class on slices of parameters, wherever their state comes from.
"""

from infinity.optim.classes import Lion

__all__ = ["Lion"]
