"""Equality of hyperparameters and states, whatever types they have."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


def same_values(left: object, right: object) -> bool:
    """Whether two nested values are equal: tensors and arrays by shape, dtype and elements; NaN is equal to NaN."""
    if left is right:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and _same_tensors(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_values(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same_values(one, other) for one, other in zip(left, right, strict=True))
    if isinstance(left, numpy.ndarray) or isinstance(right, numpy.ndarray):
        return _same_arrays(left, right)
    return bool(left == right or (left != left and right != right))


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_arrays(left: object, right: object) -> bool:
    if not (isinstance(left, numpy.ndarray) and isinstance(right, numpy.ndarray)) or left.dtype != right.dtype:
        return False
    return numpy.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
