"""How PyTorch operators become ONNX where the exporter has no way, or a poor one.

The functions are handed to ``torch.onnx.export``; it calls them with graph values for tensors and
symbolic lengths, and with Python numbers for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, sqrt
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from compressor.graph.operators import operator
from compressor.models.torch.complex_values import ZEROS, add_complex, einsum, zeros
from compressor.models.torch.embedding_bags import embedding_bag
from compressor.models.torch.pools_and_norms import POOLS_AND_NORMS

Value: TypeAlias = Any
"""A tensor or a length of the graph that is being written."""
_CLAMPS = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("clamp", "clamp_", "clip", "clip_")
)
_SUBTRACTIONS = (torch.rsub, torch.Tensor.__rsub__)
_SCATTERS = (torch.scatter_reduce, torch.Tensor.scatter_reduce)
_PAIR = 3  # arguments of a sum of products of two tensors
_USUAL_RANK = 4  # of attention: batch, heads, positions, features
_FEW_ROWS = 25
"""Rows up to which PyTorch takes differences; for more it multiplies, and so does the graph."""
_MULTIPLIED, _NEVER_MULTIPLIED = 1, 2  # as compute_mode says


def translations() -> Mapping[Callable[..., Any], Callable[..., Value]]:
    """Return the functions by operator, but for those of complex values."""
    add_complex()
    aten = torch.ops.aten
    return {
        aten._cdist_forward.default: _distances,
        aten.as_strided.default: _as_strided,
        aten.scaled_dot_product_attention.default: _attention,
        **_of_vision(),
        **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), _index),
        **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), _index_put),
    }


def _of_vision() -> Mapping[Callable[..., Any], Callable[..., Value]]:
    """Return those of ``torchvision``, where it is imported: the module may call them."""
    library = torch.ops.torchvision
    found = hasattr(library, "deform_conv2d")
    return {library.deform_conv2d.default: _deformable_convolution} if found else {}


class OtherCalls(TorchFunctionMode):
    """Replaces calls that the exporter writes wrongly by equal ones while a module is traced.

    Both bounds are floats where one is, as in ``x.clamp(0.1, 1)``: the exporter makes a tensor of
    one of two numbers of different types, and finds no operator that takes a tensor and a number.
    What is taken from a float is a float, as in ``1.0 - mask``: the exporter finds no operator
    that takes a number and an integer tensor.
    Bags of embeddings become a lookup and a sum: it writes a loop that no runtime loads. Complex
    zeros and sums of products are made of real ones: it has no function for them. Neither has it
    for some adaptive pools, and it drops the divisor of an average pool. Of values that are
    averaged by index it writes the last one alone. An instance norm with statistics of its own is
    a batch norm, which ``fuse`` folds; the exporter repeats the statistics for each sample.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _CLAMPS and any(isinstance(x, float) for x in (*args, *given.values())):
            args = (args[0], *map(_as_float, args[1:]))
            given = {name: _as_float(value) for name, value in given.items()}
        elif func in _SUBTRACTIONS and any(isinstance(x, float) for x in args[1:]):
            args = (_with_fractions(args[0]), *args[1:])
        elif func is torch.nn.functional.embedding_bag and given.get("max_norm") is None:
            return embedding_bag(*args, **given)
        elif func is torch.einsum and len(args) == _PAIR and _are_complex(args[1:]):
            return einsum(*args)
        elif func in _SCATTERS and args and torch.is_floating_point(args[0]):
            func = _scattered
        elif func in POOLS_AND_NORMS and not given.get("return_indices"):
            func = POOLS_AND_NORMS[func]
        made = func(*args, **given)
        return zeros(made) if func in ZEROS and made.is_complex() else made


def _are_complex(operands: Iterable[Any]) -> bool:
    return all(isinstance(each, torch.Tensor) and each.is_complex() for each in operands)


def _scattered(
    values: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """Return ``torch.scatter_reduce`` of floats, means as sums over counts."""
    mean = reduce == "mean"
    how = "sum" if mean else reduce
    total = values.scatter_reduce(dim, index, src, how, include_self=include_self)
    if not mean:
        return total
    ones, zeros_of = torch.ones_like(src), torch.zeros_like(values)
    counts = zeros_of.scatter_add(dim, index, ones) + int(include_self)
    return total / counts.clamp(min=1.0)


def _as_float(bound: Any) -> Any:
    return float(bound) if type(bound) is int else bound


def _with_fractions(tensor: torch.Tensor) -> torch.Tensor:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return tensor.to(torch.get_default_dtype()) if whole else tensor


def _as_strided(
    self: Value,
    size: Sequence[Value],
    stride: Sequence[Value],
    storage_offset: Value | None = None,
) -> Value:
    """Return a value itself where the view has the same elements in the same order.

    PyTorch restrides the pixel that pooling leaves of an image with its channels last. The
    exporter looks every element up by a computed index, which hides the channels.
    """
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_as_strided

    lengths = [_length(n) for n in size]
    shape = [d if isinstance(d, int) else d.value for d in self.shape]
    whole = storage_offset in (None, 0) and lengths == shape and None not in shape
    if whole and _in_order(lengths, stride):
        return opset18.Identity(self)
    return aten_as_strided(self, size, stride, storage_offset)


def _deformable_convolution(
    input: Value,
    weight: Value,
    offset: Value,
    mask: Value,
    bias: Value,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Value:
    """Write ``torchvision.ops.deform_conv2d``; offsets lie as ONNX has them."""
    from onnxscript import opset19

    return opset19.DeformConv(
        input,
        weight,
        offset,
        bias,
        mask if use_mask else None,
        dilations=[dilation_h, dilation_w],
        group=groups,
        offset_group=offset_groups,
        pads=[pad_h, pad_w, pad_h, pad_w],
        strides=[stride_h, stride_w],
    )


def _index(self: Value, indices: Sequence[Value]) -> Value:
    from onnxscript.function_libs.torch_lib.ops.core import aten_index

    return aten_index(self, _widened(indices))


def _index_put(
    self: Value, indices: Sequence[Value], values: Value, accumulate: bool = False
) -> Value:
    from onnxscript.function_libs.torch_lib.ops.core import aten_index_put

    return aten_index_put(self, _widened(indices), values, accumulate)


def _widened(indices: Sequence[Value | None]) -> list[Value | None]:
    """Return indices of 64 bits: ONNX looks up and scatters by no others, which PyTorch does."""
    import onnxscript

    types = onnxscript.ir.DataType

    def widened(index: Value | None) -> Value | None:
        if index is None or index.dtype != types.INT32:
            return index
        made: Value = onnxscript.opset18.Cast(index, to=types.INT64)
        made.dtype, made.shape = types.INT64, index.shape
        return made

    return [widened(index) for index in indices]


def _length(size: Value) -> int | str | None:
    """Return a length, or the name of a dynamic one; ``None`` if it is computed."""
    if isinstance(size, int):
        return size
    maker = size.producer()
    while operator(maker).moves == "shape":
        maker = maker.inputs[0].producer()
    start = None if maker is None else maker.attributes.get_int("start", None)
    if operator(maker).family != "shape" or start is None:
        return None
    length = maker.inputs[0].shape[start]
    return length if isinstance(length, int) else str(length.value)


def _in_order(size: Sequence[int | str | None], stride: Sequence[Value]) -> bool:
    """Whether a view has its elements in the order of the memory, with none left out."""
    expected: int | None = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length == 1:
            continue
        if expected is None or not isinstance(step, int) or step != expected:
            return False
        expected = expected * length if isinstance(length, int) else None
    return True


def _attention(
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """Write out attention of any rank; the exporter has it for four axes."""
    import onnxscript
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    op: Any = onnxscript.opset18
    rank, width = len(key.shape), query.shape[-1]
    if len(query.shape) == rank == len(value.shape) == _USUAL_RANK:
        return aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    if enable_gqa or not isinstance(width, int):
        raise NotImplementedError("groups of queries, or as many features as an input has")
    factor = op.CastLike(1 / sqrt(width) if scale is None else scale, query)
    order = [*range(rank - 2), rank - 1, rank - 2]
    scores = op.MatMul(op.Mul(query, factor), op.Transpose(key, perm=order))
    seen = _until_own(op, query, key) if is_causal else attn_mask
    masked = is_causal or (seen is not None and seen.dtype == onnxscript.ir.DataType.BOOL)
    if masked:
        scores = op.Where(seen, scores, op.CastLike(float("-inf"), query))
    elif seen is not None:
        scores = op.Add(scores, seen)
    shares = op.Softmax(scores, axis=-1)
    if masked:  # a position that sees no other gets zeros
        shares = op.Where(op.IsNaN(shares), op.CastLike(0.0, query), shares)
    return op.MatMul(shares, value)


def _until_own(op: Any, query: Value, key: Value) -> Value:
    """Return which positions each position sees: those up to its own."""
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    start, end = op.Constant(value_ints=[-2]), op.Constant(value_ints=[-1])
    counts = [op.Squeeze(op.Slice(op.Shape(v), start, end)) for v in (query, key)]
    rows, columns = (op.Range(zero, count, one) for count in counts)
    return op.GreaterOrEqual(op.Unsqueeze(rows, op.Constant(value_ints=[1])), columns)


def _distances(x1: Value, x2: Value, p: float, compute_mode: int | None = None) -> Value:
    """Write ``torch.cdist``: of ``[..., n, d]`` and ``[..., m, d]``, ``[..., n, m]``.

    Args:
        p: of the norm; differences are raised to it, summed over features, and its root taken.

    Raises:
        NotImplementedError: it counts differing features.
    """
    import onnxscript

    if p == 0:
        raise NotImplementedError("a distance that counts features")
    op: Any = onnxscript.opset18
    last = op.Constant(value_ints=[-1])
    many = any(not isinstance(v.shape[-2], int) or v.shape[-2] > _FEW_ROWS for v in (x1, x2))
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
