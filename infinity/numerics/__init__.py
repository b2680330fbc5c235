"""Arithmetic on memory: compiled kernels, dtypes of optimizer states, rounding, norms, and the layout of a chunk.

Knows tensors and dtypes only; must not know parameters, units or files. Anybody may import it.
"""
