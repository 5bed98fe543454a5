"""How long a runtime takes for an operator in floats and in integers: measured facts as data.

The rates are of one thread. Nothing is timed when a plan is made or a model runs, so that equal
inputs give equal artifacts on every machine; a choice needs only the relation between two times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.plain import with_shapes
from compressor.graph.values import static_shape
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
class Rates:
    """Nanoseconds of a kernel that multiplies with a weight.

    Attributes:
        call: for each run of it.
        mac: for each multiply-accumulate.
        read: for each element of a window, whatever the number of output channels.
        tap: for each place of a window, whatever the number of channels.
        row: for each row of a window, whatever its length and the number of channels.
        output: for each element that it writes.
        entry: for each element of what it reads.
        weight: for each weight.
    """

    call: float
    mac: float
    read: float = 0.0
    tap: float = 0.0
    row: float = 0.0
    output: float = 0.0
    entry: float = 0.0
    weight: float = 0.0


@dataclass(frozen=True)
class Latency:
    """The facts of one runtime.

    Attributes:
        block: channels that a float convolution computes at a time.
        few: input channels up to which it takes them as they are.
        lanes: channels that an integer depthwise convolution computes at a time.
        dense: rates of a float convolution of images.
        depthwise: rates of a float depthwise convolution of images.
        plain: rates of a float convolution of sequences and volumes, which has no blocks.
        plain_group: nanoseconds for each group of such a convolution.
        plain_depthwise: rates where each group has one channel.
        product: rates of a float matrix product.
        integer_dense: rates of an integer convolution of four channels, or a multiple, or of 1 x 1.
        integer_copied: rates where windows must be copied first: other numbers of channels.
        integer_depthwise: rates where the channels fill all lanes.
        integer_depthwise_rest: rates where they do not.
        integer_product: rates of an integer matrix product.
        quantize: of floats to codes, for each element.
        dequantize: of codes to floats, for each element.
        layout: to turn channels last, as integer convolutions want them, into blocks of channels,
            as float ones do, or back, for each element.
        simple: an operator of floats on elements, for each element.
        function: the same for exponentials and the like.
        added: integers are added or concatenated, for each element.
        multiplied: integers are multiplied, for each element.
        looked_up: an integer function of one element.
        pooled: integers are averaged, for each element that is read.
        slow_pool: the greatest code of a window, channels first, for each element that is written.
        moved: elements are moved, for each byte.
        call: of an operator, for each run of it.
    """

    block: int
    few: int
    lanes: int
    dense: Rates
    depthwise: Rates
    plain: Rates
    plain_group: float
    plain_depthwise: Rates
    product: Rates
    integer_dense: Rates
    integer_copied: Rates
    integer_depthwise: Rates
    integer_depthwise_rest: Rates
    integer_product: Rates
    quantize: float
    dequantize: float
    layout: float
    simple: float
    function: float
    added: float
    multiplied: float
    looked_up: float
    pooled: float
    slow_pool: float
    moved: float
    call: float


# ONNX Runtime 1.31, CPU provider, one thread of a Zen 5 at 2.6 GHz with AVX-512 VNNI: the least of
# 50 runs of single kernels in ONNX Runtime's profile, fitted by hand to within a fifth for 60
# shapes. Relations of these times on other CPUs with VNNI are alike; without VNNI, integers are
# slower than here.
ORT_CPU_LATENCY = Latency(
    block=16,
    few=15,
    lanes=16,
    dense=Rates(call=1500, mac=0.0072, read=0.055, output=0.03, weight=0.05),
    depthwise=Rates(call=1500, mac=0.0125, output=0.02, entry=0.02),
    plain=Rates(call=1500, mac=0.0085, read=0.08, output=0.12, weight=0.17),
    plain_group=60,
    plain_depthwise=Rates(call=1500, mac=0.112),
    product=Rates(call=1500, mac=0.0078, weight=0.07, output=0.05),
    integer_dense=Rates(call=2500, mac=0.0019, tap=0.8, output=0.05, weight=0.012),
    integer_copied=Rates(call=2500, mac=0.0019, row=5.6, output=0.05, weight=0.012),
    integer_depthwise=Rates(call=2500, mac=0.0145, tap=0.8, output=0.02),
    integer_depthwise_rest=Rates(call=2500, mac=0.055, tap=0.8, output=0.08),
    integer_product=Rates(call=2500, mac=0.0019, weight=0.045, output=0.10),
    quantize=0.06,
    dequantize=0.09,
    layout=0.20,
    simple=0.11,
    function=0.25,
    added=0.10,
    multiplied=0.19,
    looked_up=0.25,
    pooled=0.04,
    slow_pool=18.0,
    moved=0.03,
    call=1000,
)


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of an operator.

    Attributes:
        floating: on floats.
        integer: on codes, if it has an integer kernel.
        unblocked: to undo the blocks of channels that float convolutions write, and to make them
            again, for one that does not take them.
    """

    floating: float
    integer: float = 0.0
    unblocked: float = 0.0

    @property
    def alone(self) -> float:
        """The time in a network of floats."""
        return self.floating + self.unblocked


class CostModel:
    """Predicts times of nodes from shapes.

    Args:
        facts: of the runtime.
        shapes: of values.
    """

    def __init__(self, facts: Latency, shapes: Shapes):
        self.facts = facts
        self._shapes = shapes

    def elements(self, value: ir.Value | None) -> int:
        """Return how many elements a value has; 0 where that is unknown."""
        shape = None if value is None else self._shapes.get(value.name or "")
        return 0 if shape is None else prod(shape)

    def is_image(self, value: ir.Value) -> bool:
        """Whether the order of a value's axes matters to convolutions."""
        shape = self._shapes.get(value.name or "", ())
        return len(shape) in (_IMAGE_RANK - 1, _IMAGE_RANK) and prod(shape[2:]) > 1

    def cost(self, node: ir.Node) -> Cost:
        """Return the times of a node."""
        layer = layer_of(node)
        if layer is not None and operator(node).is_product:
            return self._convolution(node, layer) if layer.is_convolution else self._product(layer)
        return self._other(node)

    def _convolution(self, node: ir.Node, layer: Layer) -> Cost:
        facts, groups = self.facts, layer.groups
        output = self._shapes.get(node.outputs[0].name or "", ())
        pixels = output[0] * prod(output[2:]) if output else 0
        entry = self.elements(node.inputs[0])
        taps, rows, columns = prod(layer.shape[2:]), layer.rows, layer.shape[1]
        plain = len(layer.shape) != _IMAGE_RANK
        if groups > 1 and columns == 1 and rows == groups:
            blocked = 1.0 if plain else _ceil(rows, facts.block) / rows
            full = facts.integer_depthwise if rows % facts.lanes == 0 else None
            work = _Work(pixels * rows * taps, 0, pixels * taps, 0, pixels * rows, entry)
            floating = work.time(facts.plain_depthwise if plain else facts.depthwise, blocked)
            integer = work.time(full or facts.integer_depthwise_rest)
            return Cost(floating + plain * facts.plain_group * groups, integer)
        wide = columns if columns <= facts.few else _ceil(columns, facts.block)
        blocked = 1.0 if plain else wide * _ceil(rows, facts.block) / (columns * rows)
        copied = taps > 1 and columns % 4
        work = _Work(
            macs=pixels * rows * columns * taps,
            reads=pixels * columns * taps * groups,
            taps=pixels * taps * groups if taps > 1 else 0,
            rows=pixels * prod(layer.shape[2:-1]) * groups,
            outputs=pixels * rows,
            weights=layer.parameters,
        )
        floating = work.time(facts.plain if plain else facts.dense, blocked)
        integer = work.time(facts.integer_copied if copied else facts.integer_dense)
        return Cost(floating + plain * facts.plain_group * groups, integer)

    def _product(self, layer: Layer) -> Cost:
        outputs = prod(self._shapes.get(layer.output, (0,)))
        work = _Work(outputs * layer.columns, outputs=outputs, weights=layer.parameters)
        return Cost(work.time(self.facts.product), work.time(self.facts.integer_product))

    def _other(self, node: ir.Node) -> Cost:
        facts, row = self.facts, operator(node)
        if row.free or row.family in ("constant", "shape"):
            return Cost(0.0)
        size = self.elements(node.outputs[0])
        entry = max((self.elements(v) for v in node.inputs), default=0)
        most = max(size, entry)
        if row.moves:
            return Cost(facts.call + 4 * facts.moved * most, facts.call + facts.moved * most)
        rate = facts.function if row.activation and not row.fused else facts.simple
        if fused_gate(node) is not None:
            return Cost(0.0, facts.call + facts.looked_up * most)
        integer = facts.added
        if row.family == "unary":
            integer = facts.looked_up
        elif row.family == "spatial":
            integer = facts.pooled
        elif row.arithmetic == "*":
            integer = facts.multiplied
        shapes = {self._shapes.get(v.name or "") for v in node.inputs if v is not None}
        output = node.outputs[0]
        blocks = self.is_image(output) and len(self._shapes[output.name or ""]) == _IMAGE_RANK
        spread = row.family == "binary" and len(shapes) > 1 and blocks
        unblocked = 2 * facts.call + facts.layout * most if spread else 0.0
        return Cost(facts.call + rate * most, facts.call + integer * most, unblocked)


def fused_gate(node: ir.Node) -> ir.Node | None:
    """Return the product ``x * f(x)`` that computes ``f`` along with it, for a node ``f``."""
    row, value = operator(node), node.inputs[0] if node.inputs else None
    readers = [use.node for use in node.outputs[0].uses()]
    if row.family != "unary" or not row.activation or len(readers) != 1:
        return None
    gated = operator(readers[0]).arithmetic == "*" and value in readers[0].inputs
    return readers[0] if gated else None


@dataclass(frozen=True)
class _Work:
    macs: int
    reads: int = 0
    taps: int = 0
    rows: int = 0
    outputs: int = 0
    entries: int = 0
    weights: int = 0

    def time(self, rates: Rates, blocked: float = 1.0) -> float:
        """Return nanoseconds; blocks of channels that are not full make products more."""
        windows = self.reads * rates.read + self.taps * rates.tap + self.rows * rates.row
        whole = self.outputs * rates.output + self.entries * rates.entry
        macs = self.macs * blocked * rates.mac
        return rates.call + macs + windows + whole + self.weights * rates.weight


def _ceil(size: int, block: int) -> int:
    return -(-size // block) * block
