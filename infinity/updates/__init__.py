"""Optimizer updates: which unit's is due, what the groups say, and the stream that runs them beside the model.

Knows gradients, states and weights by unit; must not know which order the micro-batches have.
"""
