"""Optimizers whose state lies outside memory: what is known of their rules, and how a rule runs on pieces of parameters.

A `Template` holds the hyperparameters that users and learning rate schedulers see. A `PieceUpdater` runs the same optimizer
class on pieces of parameters, wherever their state comes from. Knows optimizers; must not know units or where states rest.
"""

from infinity.optim.classes import Lion

__all__ = ["Lion"]
