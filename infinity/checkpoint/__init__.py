"""Weights and optimizer states from outside the training loop: read, changed, exported, saved and resumed.

Knows where everything rests, and has the coordinator open units; must not know the engine.
"""
