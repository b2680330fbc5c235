"""Threads: the engine lock, torch's OpenMP workers, and settings of single threads."""
