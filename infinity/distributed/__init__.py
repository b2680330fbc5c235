"""Other processes. Knows ``torch.distributed``, as the only room; must not know models."""
