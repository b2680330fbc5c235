"""What torch and the user's training loop call: hooks, page faults, backwards, phases, ``parameter.grad``, batches.

Knows what the loop did so far; must not know the vertical order or the engine above it.
"""
