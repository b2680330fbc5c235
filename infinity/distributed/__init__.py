"""Other processes: the only package that uses ``torch.distributed``."""
