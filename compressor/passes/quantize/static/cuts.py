"""Cuts a network into what computes on codes and what computes in floating point.

Times are capacities: an edge is cut if it leads from the side of codes to that of floats. A value
lies in one of three layouts: with its channels last, as integer convolutions want it, first, or in
blocks, as float convolutions do. Two ends stand for that: one is on the side of codes where
channels are last, the other on that of floats where they are in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.passes.quantize.static.latency import CostModel, fused_gate, layer_behind

_CODES, _FLOATS = "codes", "floats"
"""The ends of the network: codes have their channels last, floats in blocks."""
_MOVES = ("some", "padded")
_WHOLE = 10**9  # capacity of the time that the float model takes; flows are counted in integers

_Edge: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True)
class Kernels:
    """What a target does with the nodes of a graph.

    Attributes:
        layers: nodes that may become integer layers, with the layers' names.
        joins: nodes that may become integer without a weight.
        carriers: nodes that move elements, of codes or of floats.
        float_writers: layers that write floats or codes, as wanted, in the same time.
        absorbed: activations that are computed along with the node that they read.
        usual: the joins that become integer if nothing is known of times.
    """

    layers: Mapping[ir.Node, str]
    joins: frozenset[ir.Node]
    carriers: frozenset[ir.Node]
    float_writers: frozenset[ir.Node]
    absorbed: frozenset[ir.Node]
    usual: frozenset[ir.Node]


@dataclass(frozen=True)
class Sides:
    """A choice and the time that it takes.

    Attributes:
        integer: nodes on the side of the codes.
        ratios: the time on each kind of CPU, over that of the float model.
    """

    integer: frozenset[ir.Node]
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The mean over kinds of CPUs."""
        return math.fsum(self.ratios) / len(self.ratios)


class Network:
    """A graph whose nodes may compute on codes, on one or several kinds of CPUs.

    Args:
        graph: whose nodes are to be cut apart.
        kernels: what may be done with them.
        costs: times on each kind of CPU.
        prices: what a node on codes must save at least, over the float model's time. They count
            where a choice is made, and not in its time.
    """

    def __init__(
        self,
        graph: ir.Graph,
        kernels: Kernels,
        costs: Sequence[CostModel],
        prices: Mapping[ir.Node, float] | None = None,
    ):
        self.layers = frozenset(kernels.layers)
        self._parts = [_Edges(graph, kernels, model) for model in costs]
        free = self._parts[0].free
        floats = dict.fromkeys(free, _FLOATS)
        self.floating = tuple(part.time(_cut(part.capacities, floats)) for part in self._parts)
        """Nanoseconds of the float model on each kind of CPU."""
        merged: dict[_Edge, float] = {}
        for part, whole in zip(self._parts, self.floating, strict=True):
            for edge, time in part.capacities.items():
                merged[edge] = merged.get(edge, 0.0) + time / (whole or 1.0) / len(self._parts)
        for node, price in (prices or {}).items():
            merged[node, _FLOATS] = merged.get((node, _FLOATS), 0.0) + price
        self._merged = merged

    def cut(self, integer: Collection[ir.Node], floats: Collection[ir.Node] = ()) -> Sides:
        """Return the choice of least time in which some nodes have their side."""
        sides = {**dict.fromkeys(floats, _FLOATS), **dict.fromkeys(integer, _CODES)}
        return self._sides(_cut(self._merged, sides))

    def turned(self, chosen: Sides, island: Collection[ir.Node]) -> tuple[float, float]:
        """Return an island's time with its layers integer, over that in floating point.

        Its joins and moves become integer where that is better; all else stays as it is chosen.

        Returns:
            The ratio, and what integers would save of the float model's time.
        """
        layers = {node for node in island if node in self.layers}
        others = self._parts[0].free - chosen.integer - {*island}
        turned = self.cut(chosen.integer | layers, others)
        alone = math.fsum(
            part.floating(node) / whole / len(self._parts)
            for part, whole in zip(self._parts, self.floating, strict=True)
            for node in island
        )
        saved = chosen.ratio - turned.ratio
        return 1 - saved / alone, saved

    def islands(self, chosen: Sides) -> Iterator[frozenset[ir.Node]]:
        """Yield the connected parts that stay in floating point and hold a layer."""
        import networkx

        parts = networkx.Graph()
        nodes = self._parts[0].nodes
        for node in nodes:
            if node in chosen.integer:
                continue
            parts.add_node(node)
            for value in node.outputs:
                readers = (use.node for use in self._parts[0].written(value).uses())
                parts.add_edges_from(
                    (node, r) for r in readers if r in nodes and r not in chosen.integer
                )
        for part in networkx.connected_components(parts):
            if any(node in self.layers for node in part):
                yield frozenset(part)

    def _sides(self, codes: Collection[Any]) -> Sides:
        times = (part.time(codes) for part in self._parts)
        pairs = zip(times, self.floating, strict=True)
        ratios = tuple(time / (whole or 1.0) for time, whole in pairs)
        return Sides(frozenset(n for n in self._parts[0].free if n in codes), ratios)


def _cut(capacities: Mapping[_Edge, float], sides: Mapping[Any, str]) -> Collection[Any]:
    """Return what is on the side of the codes in a cut of least capacity.

    Args:
        capacities: of edges; infinite where they are never cut.
        sides: where some nodes have to be.
    """
    import networkx
    from networkx.algorithms.flow import boykov_kolmogorov

    whole = math.fsum(time for time in capacities.values() if math.isfinite(time)) or 1.0
    edges: Any = networkx.DiGraph()
    edges.add_nodes_from((_CODES, _FLOATS))
    for (start, end), time in capacities.items():
        ends = sides.get(start, start), sides.get(end, end)
        if ends[0] is ends[1] or ends[0] is _FLOATS or ends[1] is _CODES:
            continue
        held = edges.get_edge_data(*ends, {"capacity": 0})
        edges.add_edge(*ends)
        if "capacity" not in held or not math.isfinite(time):
            edges.edges[ends].pop("capacity", None)
        else:
            edges.edges[ends]["capacity"] = held["capacity"] + round(_WHOLE * time / whole)
    _, (codes, _) = networkx.minimum_cut(edges, _CODES, _FLOATS, flow_func=boykov_kolmogorov)
    return {*codes, *(node for node, side in sides.items() if side is _CODES)}


@dataclass
class _Edges:
    """The edges of a graph on one kind of CPU."""

    graph: ir.Graph
    kernels: Kernels
    costs: CostModel
    capacities: dict[_Edge, float] = field(default_factory=dict)  # nanoseconds
    constant: float = 0.0

    def __post_init__(self) -> None:
        kernels = self.kernels
        self.nodes = dict.fromkeys(n for n in self.graph if n not in kernels.absorbed)
        self.free = frozenset({*kernels.layers, *kernels.joins, *kernels.carriers})
        for node in self.nodes:
            self._weigh(node)
        for value in self.graph.inputs:
            if not value.is_initializer():
                self._convert(value, None)
        for node in self.nodes:
            for value in node.outputs:
                self._convert(self.written(value), node)

    def time(self, codes: Collection[Any]) -> float:
        """Return the nanoseconds of a choice, given all that is on the side of the codes."""
        sides = {*codes, _CODES}
        cut = (t for (a, b), t in self.capacities.items() if a in sides and b not in sides)
        return self.constant + math.fsum(cut)

    def floating(self, node: ir.Node) -> float:
        """Return the nanoseconds of a node in a network of floats."""
        return self.costs.cost(node).floating

    def written(self, value: ir.Value) -> ir.Value:
        """Return a value after the activation that is computed along with it."""
        readers = [use.node for use in value.uses()]
        alone = len(readers) == 1 and readers[0] in self.kernels.absorbed
        return readers[0].outputs[0] if alone else value

    def _weigh(self, node: ir.Node) -> None:
        cost, codes, last = self.costs.cost(node), self._codes(node), self._last(node)
        blocks = self._first(node)
        self._edge(codes, blocks, math.inf)
        self._edge(last, blocks, math.inf)
        if codes is _FLOATS:
            self.constant += cost.floating
        else:
            self._edge(_CODES, codes, cost.floating)
            self._edge(codes, _FLOATS, cost.integer)
        self._edge(blocks, _FLOATS, cost.outside)
        if not _makes_blocks(node):
            for value in filter(self.costs.is_image, node.inputs):
                self._edge(self._first(self._maker(value)), blocks, math.inf)
        before = layer_behind(node)
        if cost.alone and before is not None:
            self._edge(self._codes(before), codes, cost.alone)
        gate = fused_gate(node)
        if gate is not None:
            self._edge(self._codes(gate), codes, cost.apart)
        if cost.channels_first and codes is node:
            # Codes whose channels come first take it long. Channels come last if a convolution
            # before it writes codes. What quantizes behind a pool of floats has a copy before it,
            # since ONNX Runtime would move it in front.
            facts, size = self.costs.facts, self.costs.elements(node.outputs[0])
            copied = facts.call + facts.simple * size
            for use in node.outputs[0].uses():
                self._edge(self._codes(use.node), node, copied)
            self._edge(node, self._codes(self._layer_before(node)), cost.channels_first)

    def _convert(self, value: ir.Value, maker: ir.Node | None) -> None:
        """Add what it takes to convert a value between its maker and its readers."""
        readers = [use.node for use in value.uses()]
        if value.dtype not in (None, ir.DataType.FLOAT) or not value.name:
            return
        facts, size = self.costs.facts, self.costs.elements(value)
        writes_floats = maker in self.kernels.float_writers
        there = 0.0 if writes_floats else facts.call + facts.dequantize * size
        back = facts.call + facts.quantize * size
        ends: list[object] = [self._codes(reader) for reader in readers]
        out = value.is_graph_output()
        self._join(("codes", value), self._codes(maker), [*ends, *[_FLOATS] * out], (there, back))
        if self.costs.has_places(value) and operator(maker).moves != "order":
            turn = facts.call + facts.turn * size
            ends = [self._last(r) for r in readers if operator(r).moves != "order"]
            self._join(("last", value), self._last(maker), [*ends, *[_FLOATS] * out], (turn, turn))
        if self.costs.is_image(value):
            turn = facts.call + facts.block_layout * size
            ends = [self._first(reader) for reader in readers]
            self._join(("first", value), self._first(maker), [*ends, *[_CODES] * out], (turn, turn))

    def _join(
        self, name: object, maker: object, readers: Iterable[object], times: tuple[float, float]
    ) -> None:
        """Make either conversion cost once, however many readers need it."""
        there, back = times
        for reader in readers:
            self._edge((name, "there"), reader, math.inf)
            self._edge(reader, (name, "back"), math.inf)
        self._edge(maker, (name, "there"), there)
        self._edge((name, "back"), maker, back)

    def _edge(self, start: object, end: object, time: float) -> None:
        """Add an edge, or to what it costs to cut it."""
        if start is not end and start is not _FLOATS and end is not _CODES:
            self.capacities[start, end] = self.capacities.get((start, end), 0.0) + time

    def _maker(self, value: ir.Value | None) -> ir.Node | None:
        """Return what writes a value, before the activation that is computed along with it."""
        node = None if value is None else value.producer()
        if node is None or node not in self.kernels.absorbed:
            return node
        return self._maker(node.inputs[0])

    def _codes(self, node: ir.Node | None) -> object:
        """Return what stands for whether a node computes on codes."""
        return node if node in self.free else _FLOATS

    def _last(self, node: ir.Node | None) -> object:
        """Return what stands for whether a node's channels come last."""
        row = operator(node)
        if node in self.kernels.layers:
            return node if row.is_convolution else _FLOATS
        if is_pool(node):
            return self._codes(node)
        either = _is_elementwise(node) or node in self.kernels.joins or row.moves in _MOVES
        return ("last", node) if either and node in self.nodes else _FLOATS

    def _first(self, node: ir.Node | None) -> object:
        """Return what stands for whether a node's channels come first or last, not in blocks."""
        if node is None or node not in self.nodes or not self.costs.blocks(node):
            return _CODES
        return self._codes(node) if operator(node).is_convolution else ("first", node)

    def _layer_before(self, node: ir.Node | None) -> ir.Node | None:
        """Return the layer from which a node's first input comes."""
        while node is not None and node not in self.kernels.layers:
            value = node.inputs[0] if node.inputs else None
            node = None if value is None else value.producer()
        return node


def is_pool(node: ir.Node | None) -> bool:
    """Whether a node picks elements of windows."""
    row = operator(node)
    return row.moves == "some" and row.family == "spatial"


def _makes_blocks(node: ir.Node) -> bool:
    """Whether ONNX Runtime turns what a node of floats reads into blocks of channels.

    Convolutions and pools have that; others work on blocks where all that they read lies in them.
    """
    row = operator(node)
    pools = row.family == "spatial" and (bool(row.moves) or bool(row.kernels))
    return row.is_convolution or pools


def _is_elementwise(node: ir.Node | None) -> bool:
    return operator(node).family in ("unary", "binary", "cast-like")
