"""The user's training loop: its phases, its backwards, what ``parameter.grad`` gives, and its batches.

Knows what the loop did so far; must not know the vertical order or the engine above it.
"""
