"""Reads checkpoints that DeepSpeed has written, without DeepSpeed, and converts them."""
