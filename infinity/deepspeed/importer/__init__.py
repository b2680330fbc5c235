"""Reads checkpoints that DeepSpeed has written, without DeepSpeed, and converts them.

Knows DeepSpeed's files; must not know engines, models or tiers.
"""
