"""Weights and states from outside the training loop: looked at, changed, exported, saved and resumed.

Knows where everything rests, and has the coordinator open units; must not know the engine.
"""
