"""The operators of dynamic quantization in ONNX, in the order that ONNX Runtime fuses.

``y = Cast(MatMulInteger(x_codes, codes, x_zero_point)) * (x_scale * scale) + bias`` with
``x_codes, x_scale, x_zero_point = DynamicQuantizeLinear(x)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from compressor.graph.codes import Codes
from compressor.graph.editing import Attributes, Editor
from compressor.types.layers import Layer

_CONVOLUTION_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def unfit(layer: Layer, node: ir.Node, *, convolutions: bool) -> str:
    """Say why a node that multiplies with a weight cannot be integer; empty if it can."""
    if layer.kind == "ConvTranspose":
        return "ONNX has no integer ConvTranspose"
    if layer.kind == "Conv" and not convolutions:
        return "a convolution, and the option convolutions is off"
    if layer.kind == "Gemm":
        attributes = node.attributes
        plain = attributes.get_float("alpha", 1.0) == 1.0 == attributes.get_float("beta", 1.0)
        if not plain or attributes.get_int("transA", 0) != 0:
            return "its alpha, beta or transA has no integer form"
    if not _is_direct(node.inputs[1]):
        return "its weight is quantized or cast already"
    return ""


class _Chain:
    """Nodes that follow one another, named after the value that they lead to."""

    def __init__(self, editor: Editor, name: str):
        self._editor = editor
        self._name = name
        self.nodes: list[ir.Node] = []

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        suffix: str,
        dtype: ir.DataType | None = ir.DataType.FLOAT,
        attributes: Attributes | None = None,
    ) -> ir.Value:
        made = self._editor.node(op_type, inputs, self._name + suffix, dtype, attributes)
        self.nodes.append(made)
        return made.outputs[0]


class DynamicWriter:
    """Replaces nodes by their dynamically quantized form.

    All readers of an activation in one graph share its quantization.

    Args:
        editor: of the model that is changed.
    """

    def __init__(self, editor: Editor):
        self._editor = editor
        self._quantized: dict[tuple[int, int], list[ir.Value]] = {}
        self._shapes: dict[int, ir.Value] = {}

    def replace(self, node: ir.Node, layer: Layer, codes: Codes) -> None:
        """Replace a ``MatMul``, ``Gemm`` or ``Conv``; its output keeps its name.

        Args:
            node: as :func:`unfit` finds nothing to say about.
            layer: the layer as this node reads it.
            codes: its weight.
        """
        graph, source, output = node.graph, node.inputs[0], node.outputs[0]
        assert graph is not None
        assert source is not None
        activation, scale, zero = self._activation(graph, node, source)
        chain = _Chain(self._editor, output.name or "")
        weight, weight_scale = self._weight(chain, layer, codes)
        convolution = layer.kind == "Conv"
        integers = chain.add(
            "ConvInteger" if convolution else "MatMulInteger",
            [activation, weight, zero],
            "_integers",
            ir.DataType.INT32,
            _convolution(node) if convolution else None,
        )
        integers.shape = output.shape
        floats = chain.add("Cast", [integers], "_floats", attributes={"to": ir.DataType.FLOAT})
        both = chain.add("Mul", [scale, weight_scale], "_scale")
        result = chain.add("Mul", [floats, both], "_scaled")
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None:
            if convolution:
                bias = chain.add("Reshape", [bias, self._channels(layer)], "_bias")
            result = chain.add("Add", [result, bias], "_biased")
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], chain.nodes, [output], [result]
        )

    def _weight(self, chain: _Chain, layer: Layer, codes: Codes) -> tuple[ir.Value, ir.Value]:
        """Return the codes and their scale in the form that the integer operator wants."""
        if layer.kind == "Conv":
            if codes.scheme.granularity == "tensor":
                return codes.codes, codes.scale
            form = [codes.scale, self._channels(layer)]
            return codes.codes, chain.add("Reshape", form, "_weight_scale")
        if layer.transposed:
            return codes.codes, codes.scale
        turned = chain.add(
            "Transpose", [codes.codes], "_weight", codes.codes.dtype, {"perm": [1, 0]}
        )
        return turned, codes.scale

    def _activation(self, graph: ir.Graph, reader: ir.Node, source: ir.Value) -> list[ir.Value]:
        """Return the codes, scale and zero point of an activation, made before its first reader."""
        key = id(graph), id(source)
        if key not in self._quantized:
            name = source.name or ""
            outputs = [
                ir.Value(name=self._editor.free_name(name + suffix), type=ir.TensorType(dtype))
                for suffix, dtype in (
                    ("_codes", ir.DataType.UINT8),
                    ("_scale", ir.DataType.FLOAT),
                    ("_zero_point", ir.DataType.UINT8),
                )
            ]
            outputs[0].shape = source.shape
            node = ir.node("DynamicQuantizeLinear", [source], outputs=outputs, name=outputs[0].name)
            reader.prepend(node)
            self._quantized[key] = outputs
        return self._quantized[key]

    def _channels(self, layer: Layer) -> ir.Value:
        """Return the shape ``[-1, 1, ..]`` that lays a vector along a convolution's channels."""
        axes = len(layer.shape) - 2
        if axes not in self._shapes:
            shape = np.array([-1] + [1] * axes, np.int64)
            self._shapes[axes] = self._editor.constant(f"channels_{axes}d", shape)
        return self._shapes[axes]


def _convolution(node: ir.Node) -> Attributes:
    given = {
        name: node.attributes[name] for name in _CONVOLUTION_ATTRIBUTES if name in node.attributes
    }
    return {name: attribute.value for name, attribute in given.items()}


def _is_direct(weight: ir.Value | None) -> bool:
    """Tell whether a weight comes from its initializer through transposes alone."""
    while weight is not None and not weight.is_initializer():
        node = weight.producer()
        if node is None or node.op_type not in ("Transpose", "Identity"):
            return False
        weight = node.inputs[0]
    return weight is not None
