"""Recognise operators that are written out: activations, attention, normalizations, pooling."""

from __future__ import annotations

from math import isclose, pi, sqrt

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import (
    constant_array,
    constant_of,
    input_of,
    is_op,
    sole_reader,
    static_shape,
)
from compressor.passes.fuse.draft import (
    Draft,
    axes_of,
    has_kernels,
    maker,
    node_graph,
    private_maker,
    put,
    rank,
    replace,
    scalar,
)
from compressor.passes.fuse.halves import number_is_held
from compressor.types.carrier import Carrier

_CUBE = 0.044715


def gelu(node: ir.Node, draft: Draft) -> bool:
    """Replace GELU written out, ``x/2 (1 + erf(x/sqrt 2))`` or its tanh form, by Gelu.

    The factors may come in any order. D. Hendrycks, K. Gimpel, Gaussian Error Linear Units, 2016.
    """
    if draft.opset < 20 or not is_op(node, "Mul", "Div"):
        return False
    factor, values = _factors(node.outputs[0])
    if not _near(factor, 0.5) or len(values) != 2:
        return False
    for gate, source in (values, reversed(values)):
        form = _gate(gate, source)
        if form is not None and rank(source) == rank(node.outputs[0]):
            replace(node, "Gelu", [source], {"approximate": form})
            return True
    return False


def _gate(gate: ir.Value, source: ir.Value) -> str | None:
    """Return the form of GELU that ``1 + f(source)`` belongs to, if any."""
    add = maker(gate, "Add")
    if add is None or sole_reader(gate) is None:
        return None
    inner = [v for v in add.inputs if scalar(v) is None]
    ones = [v for v in add.inputs if scalar(v) == 1]
    if len(inner) != 1 or len(ones) != 1:
        return None
    curve = private_maker(inner[0], add, "Erf", "Tanh")
    if curve is None or curve.inputs[0] is None:
        return None
    factor, values = _factors(curve.inputs[0])
    if is_op(curve, "Erf"):
        return "none" if _near(factor, sqrt(0.5)) and values == [source] else None
    if not _near(factor, sqrt(2 / pi)) or len(values) != 1:
        return None
    return "tanh" if _is_cubic(values[0], source) else None


def _is_cubic(value: ir.Value, source: ir.Value) -> bool:
    """Whether a value is ``source + 0.044715 source^3``."""
    add = maker(value, "Add")
    if add is None or source not in add.inputs:
        return False
    others = [v for v in add.inputs if v is not source and v is not None]
    if len(others) != 1:
        return False
    factor, values = _factors(others[0])
    if not _near(factor, _CUBE):
        return False
    if len(values) == 1:
        power = maker(values[0], "Pow")
        return power is not None and power.inputs[0] is source and scalar(power.inputs[1]) == 3
    return values == [source] * 3


def _factors(value: ir.Value) -> tuple[float, list[ir.Value]]:
    """Split a product into its constant factor and the other factors."""
    node = maker(value, "Mul", "Div")
    if node is None:
        return 1.0, [value]
    first, second = node.inputs
    if first is None or second is None:
        return 1.0, [value]
    if is_op(node, "Div"):
        divisor = scalar(second)
        if not divisor:
            return 1.0, [value]
        factor, values = _factors(first)
        return factor / divisor, values
    total, variables = 1.0, []
    for part in (first, second):
        number = scalar(part)
        factor, values = (number, []) if number is not None else _factors(part)
        total *= factor
        variables += values
    return total, variables


def _near(first: float, second: float) -> bool:
    return isclose(first, second, rel_tol=1e-6)


def merge_clips(node: ir.Node, draft: Draft) -> bool:
    """Replace two of Clip and Relu in a row by one."""
    if draft.opset < 11 or not is_op(node, "Clip", "Relu"):
        return False
    inner = private_maker(node.inputs[0], node, "Clip", "Relu")
    dtype = node.outputs[0].dtype
    if inner is None or dtype is None or not dtype.is_floating_point():
        return False
    first, second = _bounds(inner), _bounds(node)
    if first is None or second is None:
        return False
    # the outer bounds win where the two intervals do not meet
    low, high = (float(np.clip(bound, *second)) for bound in first)
    if (low, high) == (0.0, np.inf):
        replace(node, "Relu", [inner.inputs[0]])
        return True
    name, inputs = node.outputs[0].name, [inner.inputs[0]]
    inputs.append(None if low == -np.inf else draft.constant(low, dtype, f"{name}/min"))
    inputs.append(None if high == np.inf else draft.constant(high, dtype, f"{name}/max"))
    replace(node, "Clip", inputs)
    return True


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    if is_op(node, "Relu"):
        return 0.0, np.inf
    bounds = [-np.inf, np.inf]
    for index in (0, 1):
        bound = input_of(node, index + 1)
        if bound is not None:
            number = scalar(bound)
            if number is None:
                return None
            bounds[index] = number
    return (bounds[0], bounds[1]) if bounds[0] <= bounds[1] else None


def drop_neutral(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Remove ``x * 1``, ``x / 1``, ``x + 0`` and ``x - 0``; the numbers are compared exactly."""
    operation = operator(node).arithmetic
    if not operation or len(node.inputs) != 2:
        return False
    neutral = 1.0 if operation in ("*", "/") else 0.0
    for index in (1, 0) if operation in ("*", "+") else (1,):
        number, other = node.inputs[index], node.inputs[1 - index]
        if scalar(number) != neutral or other is None or other.shape is None:
            continue
        array = constant_array(number)
        computed = constant_array(other) is None
        if array is not None and array.ndim <= len(other.shape) and computed:
            replace(node, "Identity", [other])
            return True
    return False


_BETWEEN = ("Add", "Sub", "Mul", "Div", "Where", "Cast")


def scale_queries(node: ir.Node, draft: Draft) -> bool:
    """Replace ``MatMul(a Q, b K')`` before a Softmax by ``MatMul((a b) Q, K')``."""
    row = operator(node)
    if not (row.is_product and row.is_matmul) or not _feeds_softmax(node):
        return False
    queries, keys = node.inputs
    (left, first), (right, second) = _unscaled(queries, node), _unscaled(keys, node)
    axes = rank(left) != rank(queries) or rank(right) != rank(keys)  # that constants add
    if left is queries or right is keys or queries is None or queries.dtype is None or axes:
        return False
    if not number_is_held(first * second, queries.dtype):
        return False
    factor = draft.constant(first * second, queries.dtype, f"{node.outputs[0].name}/scale")
    scaled = put(node, "Mul", [left, factor])
    scaled.outputs[0].type, scaled.outputs[0].shape = queries.type, queries.shape
    scaled.outputs[0].name = f"{queries.name}_scaled"
    replace(node, "MatMul", [scaled.outputs[0], right])
    return True


def unguard(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace ``Where(IsNaN(p), 0, p)`` by ``p``, the Softmax of a product that nothing masks.

    PyTorch's exporter writes it behind all attention, for rows that a mask leaves nothing of. Those
    of a product are finite, as long as what is multiplied is, and so is what a constant adds.
    """
    if not is_op(node, "Where"):
        return False
    guard, shares = maker(node.inputs[0], "IsNaN"), node.inputs[2]
    softmax = maker(shares, "Softmax")
    if guard is None or softmax is None or guard.inputs[0] is not shares:
        return False
    scores, _ = _unscaled(softmax.inputs[0], softmax)
    added = maker(scores, "Add")
    if added is not None:
        numbers = constant_array(added.inputs[1])
        if numbers is None or not np.isfinite(numbers).all():
            return False
        scores, _ = _unscaled(added.inputs[0], added)
    if scores is None or not operator(scores.producer()).is_matmul:
        return False
    replace(node, "Identity", [shares])
    return True


def _unscaled(value: ir.Value | None, reader: ir.Node) -> tuple[ir.Value | None, float]:
    """Return a value before its multiplication by a constant, and the constant."""
    node = private_maker(value, reader, "Mul", "Div")
    if node is None:
        return value, 1.0
    factor = scalar(node.inputs[1])
    if factor is not None:
        if is_op(node, "Div"):
            return (node.inputs[0], 1.0 / factor) if factor else (value, 1.0)
        return node.inputs[0], factor
    factor = scalar(node.inputs[0]) if is_op(node, "Mul") else None
    return (value, 1.0) if factor is None else (node.inputs[1], factor)


def _feeds_softmax(node: ir.Node) -> bool:
    reader: ir.Node | None = node
    for _ in range(4):
        reader = None if reader is None else sole_reader(reader.outputs[0])
        if is_op(reader, "Softmax"):
            return True
        if not is_op(reader, *_BETWEEN):
            return False
    return False


def layer_norm(node: ir.Node, draft: Draft) -> bool:
    """Replace ``(x - mean) / sqrt(variance + epsilon) [* scale] [+ bias]`` by LayerNormalization.

    Over the last axis only, and in float32, where the operator computes the same. RMSNormalization
    exists from opset 23 on only; below it the standard operators stay, which runtimes fuse.
    """
    if draft.opset < 17 or not is_op(node, "Div", "Mul"):
        return False
    source, epsilon = _normalized(node) or (None, 0.0)
    length = None if source is None or not source.shape else source.shape[-1]
    if source is None or not isinstance(length, int) or source.dtype != ir.DataType.FLOAT:
        return False
    if rank(node.outputs[0]) != rank(source):
        return False  # epsilon or an exponent adds axes
    last, scale = node, None
    reader = sole_reader(node.outputs[0])
    if is_op(reader, "Mul") and reader is not None:
        scale = _vector(reader, node.outputs[0], length)
        last = reader if scale is not None else node
    bias = None
    reader = sole_reader(last.outputs[0])
    if scale is not None and is_op(reader, "Add") and reader is not None:
        bias = _vector(reader, last.outputs[0], length)
        last = reader if bias is not None else last
    if scale is None:
        ones = np.ones(length, np.float32)
        scale = draft.constant(ones, ir.DataType.FLOAT, f"{node.outputs[0].name}/scale")
    inputs = [source, scale] + ([bias] if bias is not None else [])
    replace(last, "LayerNormalization", inputs, {"axis": -1, "epsilon": epsilon})
    return True


def _normalized(node: ir.Node) -> tuple[ir.Value, float] | None:
    """Return ``x`` and epsilon of ``(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon)``."""
    deviation, root = node.inputs
    if is_op(node, "Mul"):
        inverse = maker(root, "Reciprocal")
        if inverse is None:
            deviation, root = root, deviation
            inverse = maker(root, "Reciprocal")
        root = None if inverse is None else inverse.inputs[0]
    subtract, square_root = maker(deviation, "Sub"), maker(root, "Sqrt")
    add = None if square_root is None else maker(square_root.inputs[0], "Add")
    if subtract is None or add is None or deviation is None:
        return None
    source = subtract.inputs[0]
    numbers = [scalar(v) for v in add.inputs]
    rest = [v for v, number in zip(add.inputs, numbers, strict=True) if number is None]
    epsilons = [number for number in numbers if number is not None]
    if source is None or len(rest) != 1 or len(epsilons) != 1:
        return None
    mean = _mean_of(subtract.inputs[1])
    squares = _mean_of(rest[0])
    if mean is not source or squares is None or not _is_square(squares, deviation):
        return None
    return source, epsilons[0]


def _mean_of(value: ir.Value | None) -> ir.Value | None:
    """Return the input of the mean over the last axis, which is kept, that gives a value."""
    node = maker(value, "ReduceMean")
    if node is None or not node.attributes.get_int("keepdims", 1):
        return None
    count = rank(node.inputs[0])
    axes = axes_of(node, count)
    return node.inputs[0] if count is not None and axes == [count - 1] else None


def _is_square(value: ir.Value, of: ir.Value) -> bool:
    node = maker(value, "Mul", "Pow")
    if node is None or node.inputs[0] is not of:
        return False
    return node.inputs[1] is of if is_op(node, "Mul") else scalar(node.inputs[1]) == 2


def _vector(node: ir.Node, other: ir.Value, length: int) -> ir.Value | None:
    rest = [v for v in node.inputs if v is not other and v is not None]
    if len(rest) != 1 or static_shape(rest[0]) != (length,):
        return None
    constant = rest[0].is_initializer() or constant_array(rest[0]) is not None
    return rest[0] if constant else None


def matmul_to_gemm(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace ``MatMul(x, W) + b`` with ``x`` of rank 2 and a constant row ``b`` by Gemm."""
    if operator(node).arithmetic != "+":
        return False
    for value, bias in (node.inputs, reversed(node.inputs)):
        product = private_maker(value, node)
        if product is None or not operator(product).bias_is_separate:
            continue
        if bias is None or constant_of(bias) is None:
            continue
        source, weight = product.inputs
        if weight is None or not weight.is_initializer() or rank(source) != 2:
            continue
        if weight.dtype is None or not weight.dtype.is_floating_point():
            continue  # ONNX Runtime has no Gemm of integers
        shape = static_shape(weight)
        if shape is None or len(shape) != 2:
            continue
        if static_shape(bias) not in ((shape[1],), (1, shape[1])):
            continue
        replace(node, "Gemm", [source, weight, bias])
        node_graph(product).remove(product, safe=True)
        return True
    return False


def with_gemms(carrier: Carrier) -> Carrier:
    """Return a model in which products of matrices and their biases are one operator.

    ONNX Runtime merges the two anyway, and has no integer kernel for what that leaves of codes: it
    turns the whole weight into floats in every run. A model without any is returned as it is.
    """
    draft = Draft(carrier.graph().clone())
    merged = [matmul_to_gemm(node, draft) for node in list(draft.model.graph)]
    if not any(merged):
        return carrier
    for node in draft.model.graph:
        node.name = node.name or f"node_{node.outputs[0].name}"
    return carrier.with_graph(draft.model)


_IMAGE_RANKS = (4, 5)


def mean_to_pool(node: ir.Node, draft: Draft) -> bool:  # noqa: ARG001
    """Replace a mean over all spatial axes of ``[N, C, H, W]`` (or 3-D) by GlobalAveragePool.

    A mean that drops the axes gets a Flatten behind it. Means of ``[N, T, C]`` are left alone:
    there they are usually part of a normalization.
    """
    if not is_op(node, "ReduceMean"):
        return False
    source = node.inputs[0]
    count = rank(source)
    if source is None or count not in _IMAGE_RANKS:
        return False
    axes = axes_of(node, count)
    if axes is None or sorted(axes) != list(range(2, count)):
        return False
    if not has_kernels(source):
        return False
    if node.attributes.get_int("keepdims", 1):
        replace(node, "GlobalAveragePool", [source])
        return True
    pool = put(node, "GlobalAveragePool", [source])
    if source.shape is not None:
        pool.outputs[0].shape = ir.Shape([*source.shape[:2], *[1] * (count - 2)])
    pool.outputs[0].name = f"{node.outputs[0].name}_pool"
    replace(node, "Flatten", [pool.outputs[0]], {"axis": 1})
    return True
