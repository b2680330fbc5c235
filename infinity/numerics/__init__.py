"""Arithmetic on memory: kernels, rounding, norms, and how the numbers of a chunk lie side by side.

Knows tensors and dtypes only; must not know parameters, units or files. Anybody may import it.
"""
