"""Weights and states from outside the training loop: looked at, changed, exported, saved and resumed.

Knows where everything rests; must not know the loop or the engine.
"""
