"""Weights and optimizer states from outside the training loop: read, changed, exported, saved and resumed."""
