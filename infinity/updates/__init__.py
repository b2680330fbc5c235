"""Optimizer updates: which unit's is due, what the groups say, and the stream that runs them beside the model."""
