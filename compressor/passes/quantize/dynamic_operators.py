"""Integer operators that quantize what they read while the model runs.

``y = Cast(MatMulInteger(x_codes, codes, x_zero_point)) * (x_scale * scale) + bias`` with
``x_codes, x_scale, x_zero_point = DynamicQuantizeLinear(x)``, in the order that ONNX Runtime fuses,
and ``DynamicQuantizeLSTM`` of ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import onnx_ir as ir

from compressor.graph.codes import Codes, store_codes
from compressor.graph.editing import Attributes, Chain, Editor, insert_behind
from compressor.graph.layers import layers_of
from compressor.graph.operators import Target, operator, operator_named
from compressor.graph.values import all_nodes, input_of, origin
from compressor.types.layers import LSTM, Layer, QuantizedTensor, Scheme

_RUNTIME = "com.microsoft"
_OF_LSTM = "ort-cpu"
_TARGETS = frozenset(get_args(Target))
_LSTM_INPUTS = 8
# From so many units on, ONNX Runtime's integer LSTM takes less time than that of floats: 0.76 to
# 1.02 x the time with 64 units, 0.53 to 0.82 with 128, 0.36 to 0.45 with 256, but 1.02 to 1.24 with
# 32 and less (one thread, 1 to 16 steps, 1 to 8 sequences).
_UNITS = 64
_WEIGHTS = 2  # of a recurrent node: for its input, for its state
_CONVOLUTION_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def unfit(layer: Layer, node: ir.Node, *, convolutions: bool) -> str:
    """Return why a node that multiplies with a weight cannot be integer; empty if it can."""
    if layer.is_transposed_convolution:
        return "ONNX has no integer ConvTranspose"
    if layer.is_convolution and not convolutions:
        return "a convolution, and the option convolutions is off"
    if layer.is_linear:
        attributes = node.attributes
        plain = attributes.get_float("alpha", 1.0) == 1.0 == attributes.get_float("beta", 1.0)
        if not plain or attributes.get_int("transA", 0) != 0:
            return "its alpha, beta or transA has no integer form"
    if not _is_direct(node.inputs[1]):
        return "its weight is quantized or cast already"
    return ""


class DynamicWriter:
    """Replaces nodes by their dynamically quantized form.

    All readers of an activation in one graph share its quantization.
    """

    def __init__(self, editor: Editor):
        self._editor = editor
        self._quantized: dict[tuple[int, int], list[ir.Value]] = {}
        self._shapes: dict[int, ir.Value] = {}

    def replace(self, node: ir.Node, layer: Layer, codes: Codes) -> None:
        """Replace a node that :func:`unfit` has no reason against; its output keeps its name."""
        graph, source, output = node.graph, node.inputs[0], node.outputs[0]
        assert graph is not None
        assert source is not None
        activation, scale, zero = self._activation(graph, source)
        chain = Chain(self._editor, output.name or "")
        weight, weight_scale = self._weight(chain, layer, codes)
        convolution = layer.is_convolution
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
        bias = input_of(node, 2)
        if bias is not None:
            if convolution:
                bias = chain.add("Reshape", [bias, self._channels(layer)], "_bias")
            result = chain.add("Add", [result, bias], "_biased")
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], chain.nodes, [output], [result]
        )

    def _weight(self, chain: Chain, layer: Layer, codes: Codes) -> tuple[ir.Value, ir.Value]:
        """Return the codes and their scale in the form that the integer operator wants."""
        if layer.is_convolution:
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

    def _activation(self, graph: ir.Graph, source: ir.Value) -> list[ir.Value]:
        """Return the codes, scale and zero point of an activation, which all its readers share."""
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
            insert_behind(graph, source, node)
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
    attributes = node.attributes
    return {n: attributes[n].value for n in _CONVOLUTION_ATTRIBUTES if n in attributes}


def _is_direct(weight: ir.Value | None) -> bool:
    """Whether a weight comes from its initializer through transposes alone."""
    return weight is not None and origin(weight, _turns).is_initializer()


def _turns(node: ir.Node) -> bool:
    return operator_named(node.op_type).moves in ("same", "order")


def integer_lstms(
    model: ir.Model, names: Collection[str], targets: Collection[str]
) -> Mapping[ir.Node, tuple[Layer, Layer]]:
    """Return the LSTM nodes that become integer, with the layers of their input and their state.

    Args:
        names: the layers whose weights may be stored as codes.
        targets: of the exports. ONNX Runtime's CPU provider alone has the operator.
    """
    if _TARGETS & set(targets) != {_OF_LSTM}:
        return {}
    nodes = {}
    for node in all_nodes(model.graph):
        layers = layers_of(node)
        if operator(node).recurrent != LSTM or len(layers) != _WEIGHTS:
            continue
        plain = node.attributes.get_int("layout", 0) == 0
        stored = all(value is not None and value.is_initializer() for value in node.inputs[1:3])
        large = layers[1].columns >= _UNITS
        if plain and stored and large and all(layer.name in names for layer in layers):
            nodes[node] = (layers[0], layers[1])
    while True:  # a weight that another node reads as floats stays as it is stored
        shared = [
            node
            for node in nodes
            if any(use.node not in nodes for value in _weights(node) for use in value.uses())
        ]
        if not shared:
            return nodes
        for node in shared:
            del nodes[node]


def _weights(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs[1:3] if value is not None]


class LstmWriter:
    """Replaces LSTM nodes by ``DynamicQuantizeLSTM``; layers that several share are stored once."""

    def __init__(self, editor: Editor):
        self._editor = editor
        self._stored: dict[str, Codes] = {}

    def replace(
        self,
        node: ir.Node,
        layers: Sequence[Layer],
        scheme: Scheme,
        computes: Sequence[Callable[[], QuantizedTensor]],
    ) -> list[Codes]:
        """Replace a node of :func:`integer_lstms`; its outputs keep their names.

        Returns:
            The codes of the weights, ``[directions, columns, gates * hidden]``.
        """
        stored = [
            self._codes(layer, scheme, compute)
            for layer, compute in zip(layers, computes, strict=True)
        ]
        inputs = [*node.inputs, *[None] * (_LSTM_INPUTS - len(node.inputs))]
        for index, codes in enumerate(stored, start=1):
            inputs[index] = codes.codes
            shape = codes.form.parameter_shape
            name = "x".join(map(str, ("zero_points", *shape)))
            zeros = self._editor.shared_constant(name, np.zeros(shape, np.int8))
            inputs += [codes.scale, zeros]
        outputs = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in node.outputs]
        made = ir.node(
            "DynamicQuantizeLSTM",
            inputs,
            {n: a.value for n, a in node.attributes.items() if n != "layout"},
            domain=_RUNTIME,
            outputs=outputs,
            name=node.name,
        )
        self._editor.model.opset_imports[_RUNTIME] = 1
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], [made], node.outputs, made.outputs
        )
        return stored

    def _codes(self, layer: Layer, scheme: Scheme, compute: Callable[[], QuantizedTensor]) -> Codes:
        if layer.weight not in self._stored:
            directions, rows, columns = layer.shape
            turned = replace(layer, shape=(directions, columns, rows), transposed=True)
            self._stored[layer.weight] = store_codes(self._editor, turned, scheme, compute)
        return self._stored[layer.weight]
