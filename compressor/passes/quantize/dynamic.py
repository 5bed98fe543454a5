"""``quantize-dynamic``: int8 weights, activations quantized while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from compressor.graph.stored_weights import is_quantized
from compressor.models.layer_uses import MIXED, computed_weights, paired_positions, small_table
from compressor.passes.quantize.cast.rewrite import in_single
from compressor.passes.quantize.dynamic_operators import (
    DynamicWriter,
    LstmWriter,
    integer_lstms,
    unfit,
)
from compressor.passes.quantize.maths.affine import absmax_parameters, quantize
from compressor.passes.quantize.maths.grids import kept_grids
from compressor.passes.quantize.maths.pairs import paired_scale
from compressor.passes.quantize.static.options import Overflow
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import Layer, QuantizedTensor, Scheme, sqnr_db
from compressor.types.options import Options
from compressor.types.passes import GraphPass, LayerOutcome, LayerRule, Outcome, PassContext, Survey


class DynamicWeights(Options):
    """How weights are quantized."""

    bits: Literal[8, 7] = Field(
        default=8, description="width of a weight; 7 suits CPUs that saturate, too; see overflow"
    )
    granularity: Literal["channel", "tensor"] = Field(
        default="channel", description="one scale per output channel or per tensor"
    )
    overflow: Overflow = "avoid"


class QuantizeDynamic(GraphPass):
    """Store weights as int8 and quantize activations to uint8 while the model runs.

    No calibration data is needed: the range of an activation is that of the tensor at hand. Matrix
    products become ``MatMulInteger`` in the form that ONNX Runtime fuses into
    ``DynamicQuantizeMatMul`` and ``MatMulIntegerToFloat``; it suits transformers and recurrent
    models, whose products are large, better than convolutional ones. For target `ort-cpu` an LSTM
    of 64 units or more becomes its ``DynamicQuantizeLSTM``. Weights of other recurrent layers and
    large embedding tables are stored as int8 and computed as floats.
    """

    name: ClassVar[str] = "quantize-dynamic"
    version: ClassVar[int] = 4
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

    def adapted(self, carrier: Carrier, context: PassContext) -> Carrier:
        """Return the model with what it computes in half precision in float32."""
        return in_single(carrier)

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Choose the layers by the operators that read their weights."""
        if "tensorrt" in context.targets:
            raise SpecError(
                "pass 'quantize-dynamic'",
                "writes MatMulInteger, which target tensorrt does not read",
                "use quantize-static or quantize-weights, or export to onnx with target ort-cpu",
            )
        choice = self._choice(carrier, context)
        quantized = is_quantized(carrier.graph())
        rows = plan_layers(self.name, choice.actions, choice.kept, quantized=quantized)
        return Survey(rows, notes=computed_weights(carrier))

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
    ) -> Outcome:
        """Quantize the chosen layers."""
        choice = self._choice(carrier, context)
        graph, weights = self._quantized(carrier, choice)
        outcomes = []
        for layer, codes in weights:
            before = layer.canonical(carrier.weight(layer))
            loss = sqnr_db(before, codes.quantized().dequantize())
            outcomes.append(LayerOutcome(layer.name, choice.actions[layer.name], loss))
        return Outcome(carrier.with_graph(graph), tuple(outcomes))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
    ) -> Carrier:
        """Quantize lazily: no weight is read."""
        return carrier.with_graph(self._quantized(carrier, self._choice(carrier, context))[0])

    @property
    def _scheme(self) -> Scheme:
        return Scheme(self.weights.bits, granularity=self.weights.granularity)

    def _rounding(self, layer: Layer, readers: Sequence[tuple[Layer, ir.Node]]) -> Scheme:
        """Return how a weight is rounded: a table's may be multiplied, too."""
        weights = self.weights
        pairs = [
            paired_positions(x) for x in (layer, *(x for x, _ in readers)) if not x.is_convolution
        ]
        avoids = weights.overflow == "avoid" and weights.bits == 8
        return replace(self._scheme, paired=next(filter(None, pairs), None) if avoids else None)

    def _choice(self, carrier: Carrier, context: PassContext) -> _Choice:
        model = carrier.graph()
        readers = _readers(model)
        layers = carrier.layers()
        rules = resolve_rules(self.layers, layers)
        kept = {
            layer.name: skip_reason(rules[layer.name])
            or self._obstacle(model, layer, readers.get(layer.weight, []))
            for layer in layers
        }
        chosen = {name for name, reason in kept.items() if not reason}
        lstms = integer_lstms(model, chosen, context.targets)
        integer = {layer.name for pair in lstms.values() for layer in pair}
        actions = {}
        for layer in layers:
            multiplied = any(not other.is_table for other, _ in readers.get(layer.weight, ()))
            computed = multiplied or layer.name in integer
            actions[layer.name] = f"{self._scheme} dynamic" if computed else str(self._scheme)
        return _Choice(kept, actions, frozenset(integer), context.targets)

    def _obstacle(self, model: ir.Model, layer: Layer, readers: list[tuple[Layer, ir.Node]]) -> str:
        if layer.weight not in model.graph.initializers:
            return "its weight lies in a subgraph"
        if layer.dtype != "float32":
            return f"its weight is {layer.dtype}"
        problem = obstacle(layer, self._scheme, model.opset_imports.get("", 0))
        if problem or layer.is_recurrent:
            return problem or ""
        multiplied = [(other, node) for other, node in readers if not other.is_table]
        if not multiplied:
            return small_table(layer)
        for other, node in multiplied:
            reason = unfit(other, node, convolutions=self.convolutions)
            if reason:
                return reason
            if other.output_axis != layer.output_axis:
                return MIXED
        return ""

    def _quantized(
        self, carrier: Carrier, choice: _Choice
    ) -> tuple[ir.Model, list[tuple[Layer, Codes]]]:
        model = carrier.graph().clone()
        readers = _readers(model)
        editor = Editor(model)
        writer, lstm_writer = DynamicWriter(editor), LstmWriter(editor)
        layers = [layer for layer in carrier.layers() if not choice.kept[layer.name]]
        computes: dict[str, Callable[[], QuantizedTensor]] = {
            layer.weight: partial(
                _rounded, carrier, layer, self._rounding(layer, readers.get(layer.weight, ()))
            )
            for layer in layers
        }
        stored: dict[str, Codes] = {}
        for node, pair in integer_lstms(model, choice.integer, choice.targets).items():
            made = lstm_writer.replace(
                node, pair, self._scheme, [computes[layer.weight] for layer in pair]
            )
            stored.update((layer.name, codes) for layer, codes in zip(pair, made, strict=True))
        for layer in layers:
            if layer.name in stored:
                continue
            weight = model.graph.initializers[layer.weight]
            codes = store_codes(editor, layer, self._scheme, computes[layer.weight])
            for reader, node in readers.get(layer.weight, ()):
                if not reader.is_table:
                    writer.replace(node, reader, codes)
            read_through(editor, weight, codes)
            stored[layer.name] = codes
        common.RemoveUnusedNodesPass()(model)
        return model, [(layer, stored[layer.name]) for layer in layers]


@dataclass(frozen=True)
class _Choice:
    """What is done to each layer, by name.

    Attributes:
        kept: why it is left as it is; empty where it is quantized.
        actions: what is done to it otherwise.
        integer: the layers of recurrent nodes that become integer.
        targets: of the exports.
    """

    kept: Mapping[str, str]
    actions: Mapping[str, str]
    integer: frozenset[str]
    targets: frozenset[str]


def _readers(model: ir.Model) -> dict[str, list[tuple[Layer, ir.Node]]]:
    readers: dict[str, list[tuple[Layer, ir.Node]]] = {}
    for layer, node in layers_with_nodes(model):
        readers.setdefault(layer.weight, []).append((layer, node))
    return readers


def _rounded(carrier: Carrier, layer: Layer, scheme: Scheme) -> QuantizedTensor:
    matrix = layer.canonical(carrier.weight(layer)).to(torch.float32)
    scale, zero = absmax_parameters(matrix, scheme)
    scale = paired_scale(matrix, kept_grids(matrix, scale, scheme), scheme)
    return quantize(matrix, scale, zero, scheme)
