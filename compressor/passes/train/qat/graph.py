"""Fake quantization written into the graph that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from compressor.graph.editing import Attributes, Editor, insert_behind
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.graph.values import input_of, value_by_name
from compressor.passes.train.qat.networks import (
    ActivationPoint,
    Networks,
    Points,
    WeightPoint,
    folding_factor,
    norm_factor,
)
from compressor.passes.train.qat.operators import TRAINING_DOMAIN
from compressor.types.layers import Scheme
from compressor.types.statistics import ChannelGrid
from compressor.types.tensors import Array

FROZEN = "batch_norm.frozen"
"""The initializer that is true once batch norms no longer use the statistics of batches."""


@dataclass(frozen=True)
class ScaleNames:
    """The initializers of one fake quantization.

    Attributes:
        size: the scale, as a multiple of ``unit``.
        unit: the scale at the beginning.
        zero: the zero point at the beginning.
        offset: what is added to it, in multiples of the range; ``None`` if it is fixed.
    """

    size: str
    unit: str
    zero: str
    offset: str | None = None


@dataclass(frozen=True)
class FakeQuantized:
    """A graph with fake quantization, in operators of our own domain.

    It has the scales of weights by the layer's name, those of activations by the value's, and the
    names of the scales and zero points that are trained.
    """

    graph: ir.Model
    weights: Mapping[str, ScaleNames]
    activations: Mapping[str, ScaleNames]
    trained: frozenset[str]


def fake_quantized(networks: Networks, points: Points, *, learned: bool) -> FakeQuantized:
    """Return the graph that is trained, with scales and zero points if ``learned``."""
    writer = _Writer(networks.trained.clone(), learned)
    writer.freezable_norms(networks.norms)
    weights = {
        name: writer.weight(point, networks.factors.get(name))
        for name, point in points.weights.items()
    }
    activations = {name: writer.activation(point) for name, point in points.activations.items()}
    for name, point in points.weights.items():
        if point.integer_bias:
            inputs = None if point.source is None else activations[point.source]
            writer.bias(point, weights[name], inputs)
    return FakeQuantized(writer.model, weights, activations, frozenset(writer.trained))


class _Writer:
    def __init__(self, model: ir.Model, learned: bool):
        self.model = model
        self.trained: list[str] = []
        self._editor = Editor(model)
        self._values = value_by_name(model)
        self._learned = learned
        self._nodes = {node.name: node for node in model.graph}
        self._readers = {layer.name: node for layer, node in layers_with_nodes(model)}

    def freezable_norms(self, norms: Mapping[str, str]) -> None:
        """Make the batch norms that stay read whether they are frozen."""
        if not norms:
            return
        frozen = self._editor.constant(FROZEN, np.asarray(False))
        for name in norms.values():
            node = self._nodes[name]
            node.domain = TRAINING_DOMAIN
            node.resize_inputs(6)
            node.replace_input_with(5, frozen)

    def weight(self, point: WeightPoint, rows: torch.Tensor | None) -> ScaleNames:
        """Quantize a weight, multiplied with factors of its rows, for all its readers."""
        layer, scheme = point.layer, point.scheme
        value = self.model.graph.initializers[layer.weight]
        readers = tuple(value.uses())
        first = self._editor.first_reader(value)
        assert first is not None
        channels = scheme.granularity == "channel"
        shape = (layer.rows,) if channels else ()
        scale = point.scale.reshape(shape).double()
        if point.norm is not None and point.scales_folded:
            scale = scale / folding_factor(self._nodes[point.norm], {}).abs()
        zero = point.zero_point.reshape(shape).numpy()
        names, inputs = self._scales(layer.weight, scale.numpy(), zero, self._learned, False)
        factor, added = self._factor(point)
        measure = self._measure(point, rows, scale)
        source: ir.Value = value
        if rows is not None:
            matrix = rows.float()[:, None].expand(layer.rows, layer.columns)
            held = self._editor.constant(f"{layer.weight}.rows", layer.stored(matrix).numpy())
            name = f"{layer.weight}.folded"
            added.append(self._editor.node("Mul", [value, held], name, ir.DataType.FLOAT))
            source = added[-1].outputs[0]
        axis = layer.output_axis if channels else -1
        fields = {"low": scheme.low, "high": scheme.high, "axis": axis}
        if scheme.paired is not None:
            fields |= {"paired": scheme.paired, "columns_first": int(layer.transposed)}
        operands = [source, *inputs, None, factor, measure]
        node = self._node("FakeQuantize", operands, layer.weight, fields)
        first.prepend([*added, node])
        for reader, index in readers:
            reader.replace_input_with(index, node.outputs[0])
        if point.grid is not None:
            self._pad_with_pixels(first, point.grid, layer.weight)
        return names

    def _pad_with_pixels(self, node: ir.Node, grid: ChannelGrid, name: str) -> None:
        """Make a convolution pad with the level next to zero, the nearest that has a code."""
        source, pads = node.inputs[0], tuple(node.attributes.get_ints("pads", ()))
        if source is None or not any(pads):
            return
        step, offset = np.asarray(grid.step), np.asarray(grid.offset)
        nearest = (offset + step * np.rint(-offset / step)).astype(np.float32)
        held = self._editor.constant(f"{name}.padding", nearest)
        made = self._node("PadChannels", [source, held], f"{name}.padded", {"pads": pads})
        node.prepend(made)
        node.replace_input_with(0, made.outputs[0])
        node.attributes["pads"] = ir.AttrInt64s("pads", [0] * len(pads))

    def activation(self, point: ActivationPoint) -> ScaleNames:
        """Quantize a value for all its readers."""
        value = self._values[point.value]
        readers, output = tuple(value.uses()), value.is_graph_output()
        source = self._before_relu(value, point)
        scale, zero = np.asarray(point.scale), np.asarray(point.zero_point)
        learned = self._learned and not point.exact
        names, inputs = self._scales(point.value, scale, zero, learned, learned and point.movable)
        fields = {"low": point.scheme.low, "high": point.scheme.high, "batched": 1}
        node = self._node("FakeQuantize", [source, *inputs], point.value, fields)
        insert_behind(self.model.graph, value, node)
        for reader, index in readers:
            reader.replace_input_with(index, node.outputs[0])
        if output:
            value.name = f"{point.value}.float"
            node.outputs[0].name = point.value
            for index, listed in enumerate(self.model.graph.outputs):
                if listed is value:
                    self.model.graph.outputs[index] = node.outputs[0]
        producer = value.producer()
        if source is not value and producer is not None:
            self.model.graph.remove(producer, safe=True)
        return names

    def bias(self, point: WeightPoint, scale: ScaleNames, inputs: ScaleNames | None) -> None:
        """Round a layer's bias, or that of the batch norm behind it, as it will be stored.

        Its weight has been quantized with ``scale``, its input with ``inputs``, or ``None`` where
        that is pixels, whose scale is 1.
        """
        name = point.layer.weight
        node = self._readers[point.layer.name]
        rows = self._shift_of_pixels(point, node)
        held = input_of(node, 2)
        norm = None if point.norm is None else self._nodes[point.norm]
        if norm is not None:
            bias, target = norm.inputs[2], norm
            more: ir.Value | None = self._norm_shift(name, norm, held, rows)
        else:
            bias, target, more = held, node, rows
            if bias is None:
                bias = self._editor.constant(f"{name}.no_bias", np.zeros(point.layer.rows, "f4"))
                node.resize_inputs(3)
        initializers = self.model.graph.initializers
        one = self._editor.shared_constant("one", np.ones((), np.float32))
        pair = [one, one]
        if inputs is not None:
            pair = [initializers[inputs.size], initializers[inputs.unit]]
        unit: ir.Value = initializers[scale.unit]
        if norm is not None and point.scales_folded:
            factor = self._folding_factor(norm, name, "size", (0, 1))
            factors = [unit, factor.outputs[0]]
            folded = self._editor.node("Mul", factors, f"{name}.scale.folded", ir.DataType.FLOAT)
            norm.prepend([factor, folded])
            unit = folded.outputs[0]
        operands = [bias, initializers[scale.size], unit, *pair, more]
        if norm is not None:
            operands.append(initializers[FROZEN])
        made = self._node("RoundBias", operands, f"{name}.bias", {})
        target.prepend(made)
        target.replace_input_with(2, made.outputs[0])

    def _shift_of_pixels(self, point: WeightPoint, node: ir.Node) -> ir.Value | None:
        if point.grid is None:
            return None
        name = point.layer.weight
        offsets = np.asarray(point.grid.offset, np.float32)
        held = self._editor.constant(f"{name}.offsets", offsets)
        made = self._node("ChannelShift", [node.inputs[1], held], f"{name}.shift", {})
        node.prepend(made)
        return made.outputs[0]

    def _norm_shift(
        self, name: str, norm: ir.Node, bias: ir.Value | None, shift: ir.Value | None
    ) -> ir.Value:
        """Return what a batch norm adds to its own bias, after a layer's bias and pixels' shift."""
        inner = [value for value in (bias, shift) if value is not None]
        if len(inner) == 2:
            total = self._editor.node("Add", inner, f"{name}.inner", ir.DataType.FLOAT)
            producer = inner[1].producer()
            assert producer is not None
            producer.append(total)
            inner = [total.outputs[0]]
        gamma, _, mean, variance = norm.inputs[1:5]
        fields = {"epsilon": norm_factor(norm)[2]}
        made = self._node(
            "NormShift", [gamma, mean, variance, *inner], f"{name}.norm_shift", fields
        )
        norm.prepend(made)
        return made.outputs[0]

    def _before_relu(self, value: ir.Value, point: ActivationPoint) -> ir.Value:
        """Return the input of a ReLU that rounding makes superfluous; the value itself otherwise.

        If zero is the first code, rounding cuts off negative values, as runtimes' kernels do.
        """
        node = value.producer()
        if not operator(node).rectifies or node is None or point.zero_point != point.scheme.low:
            return value
        source = node.inputs[0]
        return value if source is None or source.producer() is None else source

    def _factor(self, point: WeightPoint) -> tuple[ir.Value | None, list[ir.Node]]:
        """Return what the weight is multiplied with when it is stored, and the nodes that do."""
        added: list[ir.Node] = []
        factors: list[ir.Value] = []
        name, layer = point.layer.weight, point.layer
        if point.norm is not None:
            part = "sign" if point.scales_folded else "all"
            place = (layer.output_axis, len(layer.shape))
            made = self._folding_factor(self._nodes[point.norm], name, part, place)
            added.append(made)
            factors.append(made.outputs[0])
        if point.grid is not None:
            form = (1, -1, *[1] * (len(layer.shape) - 2))
            steps = np.asarray(point.grid.step, np.float32).reshape(form)
            factors.append(self._editor.constant(f"{name}.steps", steps))
        if len(factors) == 2:
            both = self._editor.node("Mul", factors, f"{name}.factor", ir.DataType.FLOAT)
            added.append(both)
            factors = [both.outputs[0]]
        return (factors[0] if factors else None), added

    def _measure(
        self, point: WeightPoint, rows: torch.Tensor | None, scale: torch.Tensor
    ) -> ir.Value:
        """Return the scale at the beginning, as it would be of the weight that is trained."""
        coarse = torch.ones((), dtype=torch.float64)
        if point.grid is not None:
            coarse = coarse * float(np.mean(point.grid.step))
        factors = rows
        if point.norm is not None and not point.scales_folded:
            factors = folding_factor(self._nodes[point.norm], {}).abs()
        if factors is not None:
            coarse = coarse * (factors if scale.dim() else factors.mean())
        measure = (scale / coarse).float().numpy()
        return self._editor.constant(f"{point.layer.weight}.scale.measure", measure)

    def _folding_factor(
        self, norm: ir.Node, name: str, part: str, place: tuple[int, int]
    ) -> ir.Node:
        """Return the node of a batch norm's factor; ``place`` is its axis and the rank."""
        gamma, variance, epsilon = norm_factor(norm)
        fields: Attributes = {"epsilon": epsilon, "axis": place[0], "rank": place[1], "part": part}
        return self._node("FoldingFactor", [gamma, variance], f"{name}.{part}", fields)

    def _scales(
        self, name: str, scale: Array, zero: Array, learned: bool, movable: bool
    ) -> tuple[ScaleNames, list[ir.Value]]:
        """Add the initializers of a fake quantization; return them in the operator's order."""
        size = self._editor.constant(f"{name}.scale.size", np.ones(scale.shape, np.float32))
        unit = self._editor.constant(f"{name}.scale.unit", scale.astype(np.float32))
        place = self._editor.constant(f"{name}.zero_point", zero.astype(np.float32))
        inputs = [size, unit, place]
        if movable:
            start = np.zeros(zero.shape, np.float32)
            inputs.append(self._editor.constant(f"{name}.zero_point.offset", start))
        if learned:
            self.trained += [value.name or "" for value in (size, *inputs[3:])]
        return ScaleNames(*(value.name or "" for value in inputs)), inputs

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value | None], name: str, attributes: Attributes
    ) -> ir.Node:
        output = self._editor.free_name(f"{name}.{op_type}")
        value = ir.Value(name=output, type=ir.TensorType(ir.DataType.FLOAT))
        return ir.node(
            op_type, inputs, attributes, domain=TRAINING_DOMAIN, outputs=[value], name=output
        )


def current_scale(
    names: ScaleNames, scheme: Scheme, tensors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the rounded zero point that trained tensors stand for, float32."""
    low, high = scheme.low, scheme.high
    scale = tensors[names.size] * tensors[names.unit]
    zero = tensors[names.zero]
    if names.offset is not None:
        zero = (zero + tensors[names.offset] * (high - low)).round().clamp(low, high)
    return scale, zero
