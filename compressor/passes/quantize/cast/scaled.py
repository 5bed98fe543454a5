"""The arithmetic around a product of integers, which makes floats of what it writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import (
    computes_scale,
    constant_array,
    input_of,
    is_op,
    origin,
    sole_reader,
)
from compressor.types.tensors import Array


@dataclass(frozen=True)
class Scaled:
    """What an integer product is in floats.

    Attributes:
        floats: the value that scales have made of it.
        weight: the weight's scale, without axes or a vector.
        other: the scale of what is multiplied with the weight.
        bias: floats that were added as integers.
    """

    floats: ir.Value
    weight: Array
    other: ir.Value
    bias: Array | None


def quantized_as_it_runs(codes: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return the value that is quantized as the model runs, and its scale."""
    node = None if codes is None else codes.producer()
    if node is None or not computes_scale(node) or node.outputs[0] is not codes:
        return None
    source = node.inputs[0]
    return None if source is None else (source, node.outputs[1])


def scaled_product(node: ir.Node, scale: ir.Value | None) -> Scaled | None:
    """Follow an integer product to the floats that its scales make of it.

    Quantizers multiply with the two scales, one after the other or their product, or with one
    constant for both. Older ones add the bias before that, as integers.

    Args:
        node: the product.
        scale: of what is multiplied with the weight; ``None`` for one that is constant.
    """
    value, reader = node.outputs[0], sole_reader(node.outputs[0])
    added = None
    if reader is not None and operator(reader).arithmetic == "+":
        added = next((v for v in reader.inputs if v is not value), None)
        value, reader = reader.outputs[0], sole_reader(reader.outputs[0])
    if reader is None or operator(reader).moves != "type":
        return None
    value, factors = reader.outputs[0], list[ir.Value]()
    known = scale or _constant_scale(node.inputs[0])
    while len(factors) < 2 or known not in (None, *factors):
        reader = sole_reader(value)
        if reader is None or operator(reader).arithmetic != "*":
            break
        others = [v for v in reader.inputs if v is not value and v is not None]
        found = [factor for other in others for factor in _factors(other)]
        if not all(factor is scale or _array(factor) is not None for factor in found):
            break
        factors, value = [*factors, *found], reader.outputs[0]
    other = scale or known or (factors[0] if len(factors) > 1 else None)
    if other is None or not factors or (scale is not None and scale not in factors):
        return None
    weight = _product(factor for factor in factors if factor is not other)
    if other not in factors:  # one constant for both
        weight = weight / _product([other])
    bias = None
    if added is not None:
        bias = _bias(added, factors, None if scale else weight * _product([other]))
        if bias is None:
            return None
    weight = weight.reshape(()) if weight.size == 1 else weight.reshape(-1)
    return Scaled(value, weight, other, bias)


def _constant_scale(codes: ir.Value | None) -> ir.Value | None:
    """Return the scale by which codes are quantized, if it is a constant."""
    node = None if codes is None else codes.producer()
    scale = input_of(node, 1) if node is not None and operator(node).quantizes else None
    return None if constant_array(scale) is None else scale


def _factors(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    if node is None or operator(node).arithmetic != "*":
        return [value]
    return [factor for v in node.inputs if v is not None for factor in _factors(v)]


def _product(factors: Iterable[ir.Value]) -> Array:
    product: Array = np.ones((), np.float32)
    for factor in factors:
        array = _array(factor)
        product = product if array is None else np.asarray(product * array)
    return product


def _array(factor: ir.Value) -> Array | None:
    array = constant_array(origin(factor, lambda n: operator(n).moves in ("same", "shape")))
    return None if array is None else array.astype(np.float32)


def _bias(added: ir.Value, factors: list[ir.Value], scale: Array | None) -> Array | None:
    """Return the floats that integers stand for, in the shape in which they are added.

    Args:
        added: constant integers, or floats divided by the product of the scales and rounded.
        factors: the scales.
        scale: their product, if it is constant.
    """
    array, node = constant_array(added), added.producer()
    if array is not None:
        if scale is None:
            return None
        floats = array.astype(np.float32).reshape(-1) * scale.reshape(-1)
        return floats.reshape(array.shape)
    if node is None or node.inputs[0] is None:
        return None
    if operator(node).arithmetic == "/":
        divisor = node.inputs[1]
        alike = divisor is not None and set(_factors(divisor)) == set(factors)
        return constant_array(node.inputs[0]) if alike else None
    if operator(node).moves not in ("same", "shape", "type") and not is_op(node, "Floor", "Round"):
        return None
    inner, shape = _bias(node.inputs[0], factors, scale), constant_array(input_of(node, 1))
    return inner if inner is None or shape is None else inner.reshape(shape)
