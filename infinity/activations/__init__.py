"""Tensors between forward and backward: recomputed, kept in RAM up to the budget, or spilled to NVMe beyond it."""
