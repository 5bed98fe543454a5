"""How long a runtime takes for an operator in floats and in integers, by its shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from compressor.graph.layers import layer_of, layers_with_nodes
from compressor.graph.operators import operator
from compressor.graph.plain import with_shapes
from compressor.graph.sequences import gains_as_image
from compressor.graph.values import sole_reader, static_shape
from compressor.passes.quantize.static.latency_facts import Kernel, Latency, Rates
from compressor.types.layers import Layer

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of values by name, all axes known."""


_TYPICAL = 128  # length of an axis that the model leaves open, such as the side of an image
_UNNAMED = str(ir.SymbolicDim(None))
_IMAGE_RANK = 4


def typical_shapes(model: ir.Model, samples: Shapes | None = None) -> Shapes:
    """Return the shapes of one sample, as far as they are known.

    Args:
        model: a graph, which is not changed.
        samples: shapes of inputs in the calibration data, by name; open axes of other inputs have a
            typical length.
    """
    symbols = {str(v.shape[0]) for v in model.graph.inputs if v.shape} - {_UNNAMED}
    lengths: dict[str, tuple[int, ...]] = {}
    for value in model.graph.inputs:
        name, axes = value.name or "", tuple(value.shape or ())
        sample = (samples or {}).get(name)
        if sample is None or len(sample) != len(axes):
            ones = [i == 0 or str(axis) in symbols for i, axis in enumerate(axes)]
            sample = tuple(1 if one else _TYPICAL for one in ones)
        pairs = zip(axes, sample, strict=True)
        lengths[name] = tuple(d if isinstance(d, int) else n for d, n in pairs)
    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    if any(v.shape is None or not v.shape.is_static() for v in values):
        model = with_shapes(model, lengths)
        values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    return {v.name or "": shape for v in values if (shape := static_shape(v)) is not None}


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of an operator.

    Attributes:
        floating: on floats.
        integer: on codes, if it has an integer kernel.
        alone: on floats, besides, if the float layer before it does not compute it along.
        apart: on floats, besides, if the product of floats behind it does not.
        outside: on floats, besides, if they lie in no blocks of channels.
        channels_first: on codes, besides, if their channels do not come last.
    """

    floating: float
    integer: float = 0.0
    alone: float = 0.0
    apart: float = 0.0
    outside: float = 0.0
    channels_first: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a kernel has to do: counts of what :class:`Rates` has nanoseconds of."""

    macs: int
    reads: int = 0
    taps: int = 0
    rows: int = 0
    outputs: int = 0
    entries: int = 0
    weights: int = 0
    groups: int = 0
    windows: int = 0
    lines: int = 0

    def time(self, rates: Rates, filled: float = 1.0) -> float:
        """Return nanoseconds; blocks of channels that are not full make products more."""
        windows = self.reads * rates.read + self.taps * rates.tap + self.rows * rates.row
        whole = self.outputs * rates.output + self.entries * rates.entry
        groups = self.groups * rates.group + self.windows * rates.window + self.lines * rates.line
        macs = self.macs * filled * rates.mac
        return rates.call + macs + windows + whole + groups + self.weights * rates.weight


class CostModel:
    """Predicts times of nodes from shapes.

    Args:
        facts: of the runtime on one kind of CPU.
        shapes: of values.
    """

    def __init__(self, facts: Latency, shapes: Shapes):
        self.facts = facts
        self._shapes = shapes

    def elements(self, value: ir.Value | None) -> int:
        """Return how many elements a value has; 0 where that is unknown."""
        return prod(self._shape(value)) if self._shape(value) else 0

    def is_image(self, value: ir.Value | None) -> bool:
        """Whether a value may lie in blocks of channels."""
        return len(self._shape(value)) == _IMAGE_RANK

    def has_places(self, value: ir.Value | None) -> bool:
        """Whether the order of a value's axes matters to convolutions of codes."""
        shape = self._shape(value)
        return len(shape) in (_IMAGE_RANK - 1, _IMAGE_RANK) and prod(shape[2:]) > 1

    def blocks(self, node: ir.Node) -> bool:
        """Whether a node of floats works on blocks of channels, as ONNX Runtime lays out images."""
        row, output = operator(node), node.outputs[0]
        layer = layer_of(node)
        if not self.is_image(output):
            return False
        if layer is not None:
            usual = row.is_convolution and not row.transposed_weight
            return usual and self._in_blocks(layer, output)
        shapes = [self._shape(v) for v in node.inputs if v is not None]
        if row.family == "concat":
            full = all(s and s[1] % self.facts.block == 0 for s in shapes)
            return node.attributes.get_int("axis", 0) in (1, 1 - _IMAGE_RANK) and full
        if row.family == "binary":
            return row.arithmetic in ("+", "*") and len({*shapes}) == 1
        picks = row.family == "spatial" and (bool(row.moves) or row.between_codes)
        return row.activation or picks

    def cost(self, node: ir.Node) -> Cost:
        """Return the times of a node."""
        layer = layer_of(node)
        if layer is None or not operator(node).is_product:
            return self._other(node)
        floating, integer, filled = self.kernels(node, layer)
        rates, columns = self.facts.rates, 1.0
        (float_kernel, float_work), (integer_kernel, integer_work) = floating, integer
        if integer_kernel in ("integer-dense", "integer-copied"):
            each = max(layer.rows // max(layer.groups, 1), 1)
            columns = _ceil(each, self.facts.columns) / each
        bounded = 0.0
        reader = sole_reader(node.outputs[0])
        if reader is not None and operator(reader).bounded and operator(reader).fused:
            bounded = self.facts.bounded * self.elements(node.outputs[0])
        laid_out = 0.0
        if gains_as_image(layer, self._places(node.outputs[0])):  # into blocks of channels and back
            elements = self.elements(node.inputs[0]) + self.elements(node.outputs[0])
            laid_out = 2 * self.facts.call + self.facts.block_layout * elements
        return Cost(
            float_work.time(rates[float_kernel], filled) + bounded + laid_out,
            integer_work.time(rates[integer_kernel], columns),
        )

    def kernels(
        self, node: ir.Node, layer: Layer
    ) -> tuple[tuple[Kernel, Work], tuple[Kernel, Work], float]:
        """Return a layer's kernels on floats and on codes, with their work.

        The last is how much more products blocks of channels make that are not full.
        """
        if not layer.is_convolution:
            outputs = self.elements(node.outputs[0])
            entries = outputs // max(layer.rows, 1) * layer.columns
            work = Work(
                outputs * layer.columns,
                outputs=outputs,
                weights=layer.parameters,
                entries=entries,
            )
            return ("product", work), ("integer-product", work), 1.0
        output, groups = self._shape(node.outputs[0]), layer.groups
        pixels = output[0] * prod(output[2:]) if output else 0
        taps, rows, columns = prod(layer.shape[2:]), layer.rows, layer.shape[1]
        several = taps > 1
        window_rows = prod(layer.shape[2:-1])
        work = Work(
            macs=pixels * rows * columns * taps,
            reads=pixels * columns * taps * groups,
            taps=pixels * taps * groups if several else 0,
            rows=pixels * window_rows * groups,
            outputs=pixels * rows,
            entries=self.elements(node.inputs[0]),
            weights=layer.parameters,
            groups=groups if groups > 1 else 0,
            windows=pixels * groups if groups > 1 and several else 0,
            lines=rows * pixels // max(output[-1], 1) * window_rows if output else 0,
        )
        blocked, block = self._in_blocks(layer, node.outputs[0]), self.facts.block
        integer: Kernel = "integer-copied" if several and columns % 4 else "integer-dense"
        coded = work
        if columns == 1 and rows == groups:  # so is a single channel for codes
            full = rows % self.facts.lanes == 0
            integer = "integer-depthwise" if full else "integer-depthwise-rest"
            coded = replace(work, taps=pixels * taps, weights=0)
            if groups > 1:
                floating: Kernel = "depthwise" if blocked else "plain-depthwise"
                filled = _ceil(rows, block) / rows if blocked else 1.0
                return (floating, coded), (integer, coded), filled
        wide = columns if columns < block else _ceil(columns, block)
        each = max(_ceil(rows, block), self.facts.fewest)
        filled = wide * each / (columns * rows) if blocked else 1.0
        return ("dense" if blocked else "plain", work), (integer, coded), filled

    def _places(self, value: ir.Value) -> int | None:
        return prod(self._shape(value)[2:]) if self._shape(value) else None

    def _in_blocks(self, layer: Layer, output: ir.Value) -> bool:
        """Whether a float convolution computes in blocks of channels.

        ONNX Runtime's, of images: alone, of few channels or a multiple of four; in groups, of one
        channel each or of whole blocks.
        """
        block, groups, columns = self.facts.block, layer.groups, layer.shape[1]
        if gains_as_image(layer, self._places(output)):
            return True
        if len(layer.shape) != _IMAGE_RANK:
            return False
        if groups == 1:
            return columns < block or columns % 4 == 0
        if columns == 1 and layer.rows == groups:
            return True
        return columns % block == 0 and layer.rows // groups % block == 0

    def _shape(self, value: ir.Value | None) -> tuple[int, ...]:
        return () if value is None else self._shapes.get(value.name or "", ())

    def _other(self, node: ir.Node) -> Cost:
        facts, row = self.facts, operator(node)
        if row.free or row.family in ("constant", "shape"):
            return Cost(0.0)
        output = node.outputs[0]
        size = self.elements(output)
        most = max([size, *(self.elements(v) for v in node.inputs)])
        if row.family == "spatial":
            return self._spatial(node, size, most)
        if row.moves:
            return Cost(facts.call + 4 * facts.moved * most, facts.call + facts.moved * most)
        if fused_gate(node) is not None:
            apart = facts.call + facts.function * most
            return Cost(0.0, facts.call + facts.looked_up * most, apart=apart)
        gate = any(v is not None and is_fused_gate(v.producer(), node) for v in node.inputs)
        slow = gate or (row.activation and not row.fused)
        floating = facts.call + (facts.function if slow else facts.simple) * most
        integer = facts.added
        if row.family == "unary":
            integer = facts.looked_up
        elif row.arithmetic == "*":
            integer = facts.multiplied
        shapes = {self._shape(v) for v in node.inputs if v is not None}
        spread = 0.0
        if row.family == "binary" and len(shapes) > 1 and self.has_places(output):
            spread = facts.spread * size / self._shape(output)[1]
        joined = 0.0
        if row.family == "concat" and self._joins_channels(node):
            joined = facts.joined * len(node.inputs) * size / self._shape(output)[1]
        total = facts.call + integer * most + spread + joined
        along = self._along(node)
        if along is None:
            return Cost(floating, total)
        return Cost(along, total, alone=max(floating - along, 0.0))

    def _joins_channels(self, node: ir.Node) -> bool:
        rank = len(self._shape(node.outputs[0]))
        return self.has_places(node.outputs[0]) and node.attributes.get_int("axis", 0) % rank == 1

    def _spatial(self, node: ir.Node, size: int, most: int) -> Cost:
        """Return the times of pools and of resizing."""
        facts, row = self.facts, operator(node)
        whole = self._shape(node.outputs[0])[2:]
        floating = facts.call + facts.float_pooled * most
        if row.moves:
            return Cost(
                floating,
                facts.call + facts.float_pooled * most,
                channels_first=facts.slow_pool * size,
            )
        if not row.kernels:
            return Cost(floating, outside=facts.resized * size)
        if prod(whole) == 1:
            return Cost(floating, facts.call + facts.pooled * most)
        return Cost(floating, facts.call + facts.slow_average * size)

    def _along(self, node: ir.Node) -> float | None:
        """Return what a node takes that the float convolution before it computes along.

        So do those of images: an activation, and a sum with as large a value.
        """
        facts, row = self.facts, operator(node)
        before = layer_behind(node)
        if before is None or not self.blocks(before) or not self.blocks(node):
            return None
        if row.arithmetic == "+":
            return 0.0
        if not row.activation or row.family != "unary":
            return None
        return (0.0 if row.kernels.get("ort-cpu") == "absorbed" else facts.fused) * self.elements(
            node.outputs[0]
        )


def layer_behind(node: ir.Node) -> ir.Node | None:
    """Return the convolution whose output a node alone reads."""
    for value in node.inputs:
        maker = None if value is None else value.producer()
        if value is None or maker is None or not operator(maker).is_convolution:
            continue
        if sole_reader(value) is node:
            return maker
    return None


def layer_times(
    model: ir.Model, samples: Shapes | None, facts: Sequence[Latency]
) -> Mapping[str, tuple[float, float]]:
    """Return nanoseconds of a graph's layers in floats and in integers, means over CPUs.

    Args:
        samples: as for :func:`typical_shapes`.
        facts: of each kind of CPU.
    """
    shapes = typical_shapes(model, samples)
    models = [CostModel(known, shapes) for known in facts]
    times = {}
    for layer, node in layers_with_nodes(model):
        costs = [each.cost(node) for each in models]
        times[layer.name] = (
            sum(cost.floating for cost in costs) / len(costs),
            sum(cost.integer for cost in costs) / len(costs),
        )
    return times


def fused_gate(node: ir.Node) -> ir.Node | None:
    """Return the product ``x * f(x)`` that computes ``f`` along with it, for a node ``f``."""
    row, value = operator(node), node.inputs[0] if node.inputs else None
    readers = [use.node for use in node.outputs[0].uses()]
    if row.family != "unary" or not row.activation or len(readers) != 1:
        return None
    gated = operator(readers[0]).arithmetic == "*" and value in readers[0].inputs
    return readers[0] if gated else None


def is_fused_gate(maker: ir.Node | None, product: ir.Node) -> bool:
    """Whether a node is the ``f`` of a product ``x * f(x)``."""
    return maker is not None and fused_gate(maker) is product


def _ceil(size: int, block: int) -> int:
    return -(-size // block) * block
