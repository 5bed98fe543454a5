"""The operators of dynamic quantization in ONNX, in the order that ONNX Runtime fuses.

``y = Cast(MatMulInteger(x_codes, codes, x_zero_point)) * (x_scale * scale) + bias`` with
``x_codes, x_scale, x_zero_point = DynamicQuantizeLinear(x)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.codes import Codes, obstacle, read_through, store_codes
from compressor.graph.editing import Attributes, Chain, Editor
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator_named
from compressor.graph.values import origin
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer, QuantizedTensor, Scheme, sqnr_db
from compressor.types.options import Options
from compressor.types.passes import GraphPass, LayerOutcome, LayerRule, Outcome, PassContext, Survey

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
        activation, scale, zero = self._activation(graph, node, source)
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
        bias = node.inputs[2] if len(node.inputs) > 2 else None
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
    attributes = node.attributes
    return {n: attributes[n].value for n in _CONVOLUTION_ATTRIBUTES if n in attributes}


def _is_direct(weight: ir.Value | None) -> bool:
    """Whether a weight comes from its initializer through transposes alone."""
    return weight is not None and origin(weight, _turns).is_initializer()


def _turns(node: ir.Node) -> bool:
    return operator_named(node.op_type).moves in ("same", "order")


class DynamicWeights(Options):
    """How weights are quantized."""

    bits: Literal[8, 7] = Field(
        default=8, description="width of a weight; 7 keeps x86 CPUs without VNNI from saturating"
    )
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="one scale for each output channel, or one a tensor"
    )


class QuantizeDynamic(GraphPass):
    """Store weights as int8 and quantize activations to uint8 while the model runs.

    No calibration data is needed: the range of an activation is that of the tensor at hand. Matrix
    products become ``MatMulInteger`` in the form that ONNX Runtime fuses into
    ``DynamicQuantizeMatMul`` and ``MatMulIntegerToFloat``; it suits transformers and recurrent
    models, whose products are large, better than convolutional ones.
    """

    name: ClassVar[str] = "quantize-dynamic"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH})
    source: ClassVar[str] = "Jacob et al. 2017 (arXiv:1712.05877); ONNX DynamicQuantizeLinear"

    weights: DynamicWeights = Field(default_factory=DynamicWeights, description="weights")
    convolutions: bool = Field(
        default=False,
        description="quantize convolutions too (ConvInteger: smaller, in ONNX Runtime seldom "
        "faster)",
    )
    layers: tuple[LayerRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers by the operators that read their weights."""
        if "tensorrt" in context.targets:
            raise SpecError(
                "pass 'quantize-dynamic'",
                "writes MatMulInteger, which target tensorrt does not read",
                "use quantize-static or quantize-weights, or export to onnx with target ort-cpu",
            )
        reasons = self._kept(carrier)
        action = f"{self._scheme} dynamic"
        return Survey(plan_layers(self.name, dict.fromkeys(reasons, action), reasons))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Quantize the chosen layers."""
        graph, weights = self._quantized(carrier)
        outcomes = []
        for codes in weights:
            before = codes.layer.canonical(carrier.weight(codes.layer))
            loss = sqnr_db(before, codes.quantized().dequantize())
            outcomes.append(LayerOutcome(codes.layer.name, f"{codes.scheme} dynamic", loss))
        return Outcome(carrier.with_graph(graph), tuple(outcomes))

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        return carrier.with_graph(self._quantized(carrier)[0])

    @property
    def _scheme(self) -> Scheme:
        return Scheme(self.weights.bits, granularity=self.weights.granularity)

    def _kept(self, carrier: Carrier) -> dict[str, str]:
        model = carrier.graph()
        readers = _readers(model)
        layers = carrier.layers()
        rules = resolve_rules(self.layers, [layer.name for layer in layers])
        reasons = {}
        for layer in layers:
            reasons[layer.name] = skip_reason(rules[layer.name]) or self._obstacle(
                model, layer, readers[layer.weight]
            )
        return reasons

    def _obstacle(self, model: ir.Model, layer: Layer, readers: list[tuple[Layer, ir.Node]]) -> str:
        if layer.weight not in model.graph.initializers:
            return "its weight lies in a subgraph"
        if layer.dtype != "float32":
            return f"its weight is {layer.dtype}"
        problem = obstacle(layer, self._scheme, model.opset_imports.get("", 0))
        if problem:
            return problem
        multiplied = [(other, node) for other, node in readers if not other.is_table]
        if not multiplied:
            return "a table is looked up, not multiplied"
        for other, node in multiplied:
            reason = unfit(other, node, convolutions=self.convolutions)
            if reason:
                return reason
            if other.output_axis != layer.output_axis:
                return "its readers disagree about what its output channels are"
        return ""

    def _quantized(self, carrier: Carrier) -> tuple[ir.Model, list[Codes]]:
        kept = self._kept(carrier)
        model = carrier.graph().clone()
        readers = _readers(model)
        editor = Editor(model)
        writer = DynamicWriter(editor)
        stored = []
        for layer in carrier.layers():
            if kept[layer.name]:
                continue
            weight = model.graph.initializers[layer.weight]
            compute: Callable[[], QuantizedTensor] = partial(_rounded, carrier, layer, self._scheme)
            codes = store_codes(editor, layer, self._scheme, compute)
            for reader, node in readers[layer.weight]:
                if not reader.is_table:
                    writer.replace(node, reader, codes)
            read_through(editor, weight, codes)
            stored.append(codes)
        common.RemoveUnusedNodesPass()(model)
        return model, stored


def _readers(model: ir.Model) -> dict[str, list[tuple[Layer, ir.Node]]]:
    readers: dict[str, list[tuple[Layer, ir.Node]]] = {}
    for layer, node in layers_with_nodes(model):
        readers.setdefault(layer.weight, []).append((layer, node))
    return readers


def _rounded(carrier: Carrier, layer: Layer, scheme: Scheme) -> QuantizedTensor:
    matrix = layer.canonical(carrier.weight(layer)).to(torch.float32)
    return quantize(matrix, *absmax_parameters(matrix, scheme), scheme)
