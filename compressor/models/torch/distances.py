"""Distances between the rows of two tensors, as ``torch.cdist`` computes them."""

from __future__ import annotations

from math import inf
from typing import Any

_FEW = 25
"""Rows up to which PyTorch takes differences; for more it multiplies, and so does the graph."""
_MULTIPLIED, _NEVER_MULTIPLIED = 1, 2  # as compute_mode says


def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """Write distances of rows: of ``[..., n, d]`` and ``[..., m, d]``, ``[..., n, m]``.

    Args:
        p: of the norm; differences are raised to it, summed over features, and its root taken.

    Raises:
        NotImplementedError: it counts differing features.
    """
    from onnxscript import opset18 as op

    if p == 0:
        raise NotImplementedError("a distance that counts features")
    last = op.Constant(value_ints=[-1])
    many = any(not isinstance(v.shape[-2], int) or v.shape[-2] > _FEW for v in (x1, x2))
    if p == 2 and compute_mode != _NEVER_MULTIPLIED and (many or compute_mode == _MULTIPLIED):
        lengths = [op.ReduceSumSquare(v, last, keepdims=1) for v in (x1, x2)]
        products = op.MatMul(op.Mul(x1, op.CastLike(-2.0, x1)), _turned(op, x2))
        squares = op.Add(op.Add(lengths[0], _turned(op, lengths[1], len(x2.shape))), products)
        return op.Sqrt(op.Max(squares, op.CastLike(0.0, x1)))
    first, second = op.Constant(value_ints=[-2]), op.Constant(value_ints=[-3])
    differences = op.Sub(op.Unsqueeze(x1, first), op.Unsqueeze(x2, second))
    if p == 2:
        return op.ReduceL2(differences, last, keepdims=0)
    if p == 1:
        return op.ReduceL1(differences, last, keepdims=0)
    sizes = op.Abs(differences)
    if p == inf:
        return op.ReduceMax(sizes, last, keepdims=0)
    total = op.ReduceSum(op.Pow(sizes, op.CastLike(p, x1)), last, keepdims=0)
    return op.Pow(total, op.CastLike(1 / p, x1))


def _turned(op: Any, value: Any, rank: int | None = None) -> Any:
    axes = list(range(len(value.shape) if rank is None else rank))
    return op.Transpose(value, perm=[*axes[:-2], axes[-1], axes[-2]])
