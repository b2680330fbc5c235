"""Other processes. Knows ``torch.distributed``, as the only package; must not know models."""
