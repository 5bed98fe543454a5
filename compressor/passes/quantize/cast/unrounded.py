"""Make readers of an activation's dequantized codes read the activation itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from compressor.graph.editing import Editor
from compressor.graph.operators import operator
from compressor.graph.values import (
    all_nodes,
    computes_scale,
    constant_array,
    input_of,
    is_stored,
    origin,
)
from compressor.types.tensors import Array

_CUT_ABOVE = 6.0  # of ReLU6, the one activation with two ends that quantizers leave to saturation
_NEAR = 1e-3  # share of it that an upper end may be off: its scale is rounded


def read_unrounded(model: ir.Model) -> None:
    """Replace each ``DequantizeLinear`` of an activation by what was quantized, in place.

    Nodes between that only move codes move floats. Where the lowest code stands for zero, the ReLU
    that quantizers leave out before it is put back, and so is the upper end of ReLU6.
    """
    activations = _Activations(model)
    for node in list(all_nodes(model.graph)):
        if operator(node).dequantizes:
            activations.replace(node)


class _Activations:
    def __init__(self, model: ir.Model):
        self._editor = Editor(model)
        self._floats: dict[ir.Value, ir.Value | None] = {}

    def replace(self, node: ir.Node) -> None:
        """Replace a ``DequantizeLinear``, unless it reads an input of the model."""
        floats = None if node.inputs[0] is None else self._behind(node.inputs[0], node)
        if floats is None:
            return
        same = self._editor.node("Identity", [floats], "unrounded", node.outputs[0].dtype)
        same.outputs[0].shape = node.outputs[0].shape
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], [same], node.outputs, same.outputs
        )

    def _behind(self, codes: ir.Value, reader: ir.Node) -> ir.Value | None:
        """Return the floats that codes were made of, moved as they are, or ``None``."""
        if codes not in self._floats:
            node = codes.producer()
            self._floats[codes] = None if node is None else self._unrounded(node, codes, reader)
        return self._floats[codes]

    def _unrounded(self, node: ir.Node, codes: ir.Value, reader: ir.Node) -> ir.Value | None:
        row = operator(node)
        if computes_scale(node):
            return node.inputs[0] if node.outputs[0] is codes else None
        if row.quantizes:
            return self._cut(node) if _same_scale(node, reader) else None
        several = row.family == "concat"
        if len(node.outputs) > 1 or not (several or row.moves not in ("", "type")):
            return None
        moved = node.inputs if several else node.inputs[:1]
        floats = [None if v is None else self._behind(v, reader) for v in moved]
        if any(value is None for value in floats):
            return None
        inputs = [*floats, *node.inputs[len(floats) :]]
        if row.moves == "padded" and len(inputs) > 2 and inputs[2] is not None:
            fill = _padding(inputs[2], reader)
            if fill is None:
                return None
            inputs[2] = self._editor.constant(f"{codes.name}_fill", fill)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        dtype = reader.outputs[0].dtype
        twin = self._editor.node(node.op_type, inputs, f"{codes.name}_float", dtype, attributes)
        twin.outputs[0].shape = codes.shape
        node.append(twin)
        return twin.outputs[0]

    def _cut(self, node: ir.Node) -> ir.Value | None:
        """Return what a node quantizes, with the activation that its saturation stands for."""
        value = node.inputs[0]
        ends = _ends(node)
        if value is None or ends is None or ends[0] != 0 or _is_nonnegative(value):
            return value
        if origin(value, lambda n: operator(n).moves != "").producer() is None:
            return value  # an input of the model, before which nothing was left out
        name, dtype = f"{value.name}_rectified", value.dtype
        if abs(ends[1] - _CUT_ABOVE) > _NEAR * _CUT_ABOVE:
            made = self._editor.node("Relu", [value], name, dtype)
        else:
            kind = (dtype or ir.DataType.FLOAT).numpy()
            limits = [
                self._editor.constant(f"{name}_{end}", np.array(limit, kind))
                for end, limit in (("low", 0), ("high", _CUT_ABOVE))
            ]
            made = self._editor.node("Clip", [value, *limits], name, dtype)
        made.outputs[0].shape = value.shape
        node.prepend(made)
        return made.outputs[0]


def _same_scale(quantizes: ir.Node, dequantizes: ir.Node) -> bool:
    """Whether codes mean in one node what they mean in another."""
    return list(_sides(quantizes)) == list(_sides(dequantizes))


def _sides(node: ir.Node) -> Iterator[object]:
    """Yield the scale and the zero point: their numbers, or the value where it is not constant."""
    for index in (1, 2):
        value = input_of(node, index)
        array = constant_array(value)
        numbers = value if array is None else tuple(array.reshape(-1).tolist())
        yield numbers if index == 1 or (array is not None and np.any(array)) else None


def _ends(node: ir.Node) -> tuple[float, float] | None:
    """Return the least and greatest value of a quantizer with a single scale."""
    scale, zero = constant_array(node.inputs[1]), _zero_point(node)
    dtype = node.outputs[0].dtype
    if scale is None or scale.size != 1 or dtype is None or not dtype.is_integer():
        return None
    low = 0 if not dtype.is_signed() else -(1 << (dtype.bitwidth - 1))
    high = low + (1 << dtype.bitwidth) - 1
    step = float(scale.reshape(()))
    return (low - zero) * step, (high - zero) * step


def _zero_point(node: ir.Node) -> int:
    array = constant_array(input_of(node, 2))
    return 0 if array is None else int(array.reshape(-1)[0])


def _padding(fill: ir.Value, reader: ir.Node) -> Array | None:
    """Return the float that a constant code stands for."""
    code, scale = constant_array(fill), constant_array(reader.inputs[1])
    if code is None or scale is None or scale.size != 1:
        return None
    step = scale.reshape(())
    return np.asarray((int(code.reshape(())) - _zero_point(reader)) * step, step.dtype)


def _is_nonnegative(value: ir.Value) -> bool:
    """Whether there is nothing that saturation at zero would cut off."""
    node = value.producer()
    if node is None or is_stored(value):
        array = constant_array(value)
        return array is not None and bool((array >= 0).all())
    row = operator(node)
    if row.rectifies or row.probabilities or (row.activation and row.zeros == "lost"):
        return True
    if row.zeros == "bounds" and row.activation:
        low = constant_array(input_of(node, 1))
        return low is not None and float(low.reshape(())) >= 0
    joins = row.family == "concat" or row.arithmetic in ("+", "*")
    if not (joins or row.moves or row.family in ("spatial", "reduction")):
        return False
    read = node.inputs if joins else node.inputs[:1]
    return all(v is not None and _is_nonnegative(v) for v in read)
