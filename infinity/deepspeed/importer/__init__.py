"""Checkpoints that DeepSpeed has written, read without DeepSpeed and turned into ours.

Knows DeepSpeed's files; must not know engines, models or tiers.
"""
