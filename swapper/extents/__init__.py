"""Byte ranges of an address space, and the allocator for them. Pure arithmetic."""
