"""Byte ranges of an address space, and where there is room for them. Pure arithmetic."""
