"""Arithmetic on memory: compiled kernels, dtypes of optimizer states, rounding, norms, and the layout of a chunk.

Anybody may import it.
"""
