"""``quantize-dynamic``: integer weights, activations quantized while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.codes import Codes, obstacle, read_through, store_codes
from compressor.graph.editing import Editor
from compressor.graph.layers import layers_with_nodes
from compressor.passes.quantize.affine import absmax_parameters, quantize, sqnr_db
from compressor.passes.quantize.dynamic_nodes import DynamicWriter, unfit
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer
from compressor.types.options import Options
from compressor.types.passes import (
    LayerOutcome,
    LayerRule,
    Outcome,
    Pass,
    PassContext,
    Survey,
)
from compressor.types.quantized import QuantizedTensor, Scheme


class DynamicWeights(Options):
    """How weights are quantized."""

    bits: Literal[8, 7] = Field(
        default=8,
        description="width of a weight; 7 keeps x86 CPUs without VNNI from saturating",
    )
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="one scale for each output channel, or one a tensor"
    )


class QuantizeDynamic(Pass):
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
        chosen = str(self._scheme) + " dynamic"
        rows = plan_layers(self.name, dict.fromkeys(reasons, chosen), reasons)
        return Survey(rows)

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Outcome:
        """Quantize the chosen layers."""
        graph, weights = self._quantized(carrier)
        outcomes = []
        for codes in weights:
            before = codes.layer.canonical(carrier.weight(codes.layer))
            found = sqnr_db(before, codes.quantized().dequantize())
            outcomes.append(LayerOutcome(codes.layer.name, f"{codes.scheme} dynamic", found))
        return Outcome(carrier.with_graph(graph), tuple(outcomes))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        return carrier.with_graph(self._quantized(carrier)[0])

    @property
    def _scheme(self) -> Scheme:
        return Scheme(self.weights.bits, granularity=self.weights.granularity)

    def _kept(self, carrier: Carrier) -> dict[str, str]:
        """Return for every layer why it is kept; empty where it is not."""
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
        multiplied = [(other, node) for other, node in readers if other.kind != "Gather"]
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
            for own, node in readers[layer.weight]:
                if own.kind != "Gather":
                    writer.replace(node, own, codes)
            read_through(editor, weight, codes)
            stored.append(codes)
        common.RemoveUnusedNodesPass()(model)
        return model, stored


def _readers(model: ir.Model) -> dict[str, list[tuple[Layer, ir.Node]]]:
    """Return for each weight the nodes that multiply with it, and each node's own layer."""
    readers: dict[str, list[tuple[Layer, ir.Node]]] = {}
    for layer, node in layers_with_nodes(model):
        readers.setdefault(layer.weight, []).append((layer, node))
    return readers


def _rounded(carrier: Carrier, layer: Layer, scheme: Scheme) -> QuantizedTensor:
    matrix = layer.canonical(carrier.weight(layer)).to(torch.float32)
    return quantize(matrix, *absmax_parameters(matrix, scheme), scheme)
