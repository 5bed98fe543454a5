"""Which layers and joins compute on codes: the choice of least predicted time.

Where codes meet floats, values are converted, which takes time. So the choice is one for the whole
graph: a minimum cut separates what computes on codes from what computes in floating point, and the
edges that are cut add up to the time that the choice takes. A value that several nodes read is
converted once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.passes.quantize.static.latency import CostModel, Shapes, typical_shapes
from compressor.passes.quantize.static.placement import Profile, absorbing, computes_join, place
from compressor.types.layers import Layer

_CODES, _FLOATS = "codes", "floats"
"""The ends of the network: codes have their channels last, floats do not."""
_MOVES = ("some", "padded")
_NEAR = 1.05  # how much longer a simpler choice may take: predictions are not more exact


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
class Choice:
    """Which layers stay in floating point since the target is faster so.

    Attributes:
        nodes: nodes without a weight that compute on codes, or move them.
        floats: names of the layers that stay, each with the predicted time of its part of the
            network as integers, over that as floats.
        ratio: the predicted time of the network over the float model's.
        integer_ratio: the same, if all layers were integer.
    """

    nodes: frozenset[ir.Node]
    floats: Mapping[str, float]
    ratio: float
    integer_ratio: float

    def copied(self, graph: ir.Graph, copy: ir.Graph) -> Choice:
        """Return the same choice for a copy of the graph, whose nodes have the same order."""
        places = dict(zip(graph, copy, strict=True))
        return replace(self, nodes=frozenset(places[node] for node in self.nodes))


def choose(
    model: ir.Model,
    profile: Profile,
    readers: Mapping[ir.Node, Layer],
    names: Collection[str],
    forced: Collection[str],
    samples: Shapes | None = None,
) -> Choice | None:
    """Choose the layers that become integer; ``None`` if all should, or times are not known.

    Where integers are not predicted to gain more than predictions are off, floats stay: they take
    as many bytes, and round no activation.

    Args:
        model: a graph.
        profile: the target's rules.
        readers: the layer that each node multiplies with.
        names: the layers that may become integer.
        forced: those of them that do in any case.
        samples: shapes of inputs in the calibration data, by name.
    """
    if profile.latency is None:
        return None
    shapes = typical_shapes(model, samples)
    kernels = kernels_of(model, profile, readers, names)
    if not kernels.layers or any(n.outputs[0].name not in shapes for n in kernels.layers):
        return None
    costs = CostModel(profile.latency, shapes)
    network = Network(model.graph, kernels, costs)
    layers = frozenset(kernels.layers)
    pinned = frozenset(n for n, name in kernels.layers.items() if name in forced)
    usual = network.cut(layers | kernels.usual, kernels.joins - kernels.usual)
    least = network.cut(pinned)
    # A cut takes long, so that one is only made if it is looked at.
    simpler = network.simpler(pinned, usual)
    chosen = next((c for c in simpler if c.time <= _NEAR * least.time), least)
    if chosen is usual and not any(_is_pool(n) and n not in usual.integer for n in model.graph):
        return None  # everything that moves elements between codes moves codes
    ratios: dict[ir.Node, float] = {}
    for island in network.islands(chosen):
        alone = math.fsum(costs.cost(node).alone for node in island)  # in whatever order
        turned = (network.turned(chosen, island) - chosen.time + alone) / alone
        ratios.update(dict.fromkeys(island, turned))
    return Choice(
        nodes=chosen.integer - layers,
        floats={name: ratios[n] for n, name in kernels.layers.items() if n in ratios},
        ratio=chosen.time / network.floating,
        integer_ratio=usual.time / network.floating,
    )


def kernels_of(
    model: ir.Model, profile: Profile, readers: Mapping[ir.Node, Layer], names: Collection[str]
) -> Kernels:
    """Return what a target does with a graph's nodes if some layers may become integer."""
    graph = model.graph
    layers = {
        node: layer.name
        for node, layer in readers.items()
        if layer.name in names and node.graph is graph
    }
    joins = frozenset(n for n in graph if profile.kernel(n) == "join" and computes_join(n))
    makers = [*layers, *joins]
    absorbed = [absorbing(node, profile).producer() for node in makers]
    return Kernels(
        layers=layers,
        joins=joins,
        carriers=frozenset(n for n in graph if profile.kernel(n) == "carrier"),
        float_writers=frozenset(n for n in layers if profile.kernel(n) != "layer-to-codes"),
        absorbed=frozenset(n for n in absorbed if n is not None) - {*makers},
        usual=place(model, profile, names, readers).joins,
    )


@dataclass(frozen=True)
class Sides:
    """A choice and the time that it takes."""

    integer: frozenset[ir.Node]  # nodes on the side of the codes
    codes: frozenset[Any]  # all that is on that side
    time: float  # nanoseconds


class Network:
    """Times as capacities: an edge is cut if it leads from the side of codes to that of floats."""

    def __init__(self, graph: ir.Graph, kernels: Kernels, costs: CostModel):
        import networkx

        self._edges: Any = networkx.DiGraph()
        self._kernels, self._costs = kernels, costs
        self._nodes = dict.fromkeys(n for n in graph if n not in kernels.absorbed)
        self._free = {*kernels.layers, *kernels.joins, *kernels.carriers}
        self._constant = 0.0
        for node in self._nodes:
            self._weigh(node)
        for value in graph.inputs:
            if not value.is_initializer():
                self._convert(value, None)
        for node in self._nodes:
            for value in node.outputs:
                self._convert(self._written(value), node)

    @cached_property
    def floating(self) -> float:
        """The time of the float model."""
        return sum(self._costs.cost(node).alone for node in self._nodes)

    def cut(self, integer: Collection[ir.Node], floats: Collection[ir.Node] = ()) -> Sides:
        """Return the choice of least time in which some layers have their side."""
        import networkx
        from networkx.algorithms.flow import boykov_kolmogorov

        edges = self._edges.copy()
        for ends in (*((_CODES, n) for n in integer), *((n, _FLOATS) for n in floats)):
            edges.add_edge(*ends)
            edges.edges[ends].pop("capacity", None)  # never cut
        time, (codes, _) = networkx.minimum_cut(edges, _CODES, _FLOATS, flow_func=boykov_kolmogorov)
        return Sides(frozenset(self._free & codes), frozenset(codes), self._constant + time / 1000)

    def simpler(self, pinned: Collection[ir.Node], usual: Sides) -> Iterator[Sides]:
        """Yield the choices that are simpler than that of least time, the simplest first.

        Args:
            pinned: the layers that become integer in any case.
            usual: the choice where all layers do, and the usual joins.
        """
        layers = self._kernels.layers.keys()
        if layers - pinned:
            yield self.cut(pinned, layers - pinned)
        yield usual
        yield self.cut(layers)

    def turned(self, chosen: Sides, island: Collection[ir.Node]) -> float:
        """Return the time of a choice with an island's layers integer, and its joins if better."""
        layers = {node for node in island if node in self._kernels.layers}
        free = {self._layout(node) for node in island if _is_elementwise(node)}
        every = {*map(self._codes, island), *map(self._layout, island)}
        return min(self._time(chosen.codes | moved) for moved in (layers | free, every))

    def _time(self, codes: Collection[Any]) -> float:
        """Return the time of a choice; what stands for a conversion follows the readers."""
        sides = {*codes} - {_FLOATS}
        for node in self._edges:
            if not isinstance(node, tuple):
                continue
            there = node[1] == "there" and all(n in sides for n in self._edges.successors(node))
            back = node[1] == "back" and any(n in sides for n in self._edges.predecessors(node))
            if there or back:
                sides.add(node)
        cut = (
            int(edge["capacity"])
            for start, end, edge in self._edges.edges(data=True)
            if start in sides and end not in sides
        )
        return self._constant + sum(cut) / 1000

    def islands(self, chosen: Sides) -> Iterator[frozenset[ir.Node]]:
        """Yield the connected parts that stay in floating point and hold a layer."""
        import networkx

        parts = networkx.Graph()
        for node in self._nodes:
            if node in chosen.integer:
                continue
            parts.add_node(node)
            for value in node.outputs:
                readers = (use.node for use in self._written(value).uses())
                parts.add_edges_from(
                    (node, r) for r in readers if r in self._nodes and r not in chosen.integer
                )
        for part in networkx.connected_components(parts):
            if any(node in self._kernels.layers for node in part):
                yield frozenset(part)

    def _weigh(self, node: ir.Node) -> None:
        cost, codes = self._costs.cost(node), self._codes(node)
        if cost.unblocked:
            self._edge(_CODES, self._layout(node), cost.unblocked)
        if codes is _FLOATS:
            self._constant += cost.floating
        else:
            self._edge(_CODES, codes, cost.floating)
            self._edge(codes, _FLOATS, cost.integer)
            if not _is_elementwise(node) and self._layout(node) is not codes:
                self._edge(self._layout(node), codes, None)  # floats have their channels first
        if _is_pool(node) and codes is node:
            # Codes whose channels come first take it long. Channels come last if a convolution
            # before it writes codes. What quantizes behind a pool of floats has a copy before it,
            # since ONNX Runtime would move it in front.
            facts, size = self._costs.facts, self._costs.elements(node.outputs[0])
            copied = facts.call + facts.simple * size
            for use in node.outputs[0].uses():
                self._edge(self._codes(use.node), node, copied)
            self._edge(node, self._codes(self._layer_before(node)), facts.slow_pool * size)

    def _convert(self, value: ir.Value, maker: ir.Node | None) -> None:
        """Add what it takes to convert a value between its maker and its readers."""
        readers = [use.node for use in value.uses()]
        if value.dtype not in (None, ir.DataType.FLOAT) or not value.name:
            return
        facts, size = self._costs.facts, self._costs.elements(value)
        writes_floats = maker in self._kernels.float_writers
        there = 0.0 if writes_floats else facts.call + facts.dequantize * size
        back = facts.call + facts.quantize * size
        ends = [self._codes(reader) for reader in readers]
        if value.is_graph_output():
            ends.append(_FLOATS)
        self._join(("codes", value), self._codes(maker), ends, (there, back))
        turned = [r for r in readers if operator(r).moves != "order"]
        if self._costs.is_image(value) and operator(maker).moves != "order":
            turn = facts.call + facts.layout * size
            ends = [self._layout(reader) for reader in turned]
            if value.is_graph_output():
                ends.append(_FLOATS)
            self._join(("layout", value), self._layout(maker), ends, (turn, turn))

    def _join(
        self, name: object, maker: object, readers: Sequence[object], times: tuple[float, float]
    ) -> None:
        """Make either conversion cost once, however many readers need it."""
        there, back = times
        for reader in readers:
            self._edge((name, "there"), reader, None)
            self._edge(reader, (name, "back"), None)
        if readers:
            self._edge(maker, (name, "there"), there)
            self._edge((name, "back"), maker, back)

    def _edge(self, start: object, end: object, time: float | None) -> None:
        """Add an edge, or to what it costs to cut it; with ``None`` it is never cut."""
        if start is end or start is _FLOATS or end is _CODES:
            return
        held = self._edges.get_edge_data(start, end, {"capacity": 0})
        if time is None or "capacity" not in held:
            self._edges.add_edge(start, end)
            self._edges.edges[start, end].pop("capacity", None)
        else:
            self._edges.add_edge(start, end, capacity=held["capacity"] + round(1000 * time))

    def _codes(self, node: ir.Node | None) -> object:
        """Return what stands for whether a node computes on codes."""
        return node if node in self._free else _FLOATS

    def _layout(self, node: ir.Node | None) -> object:
        """Return what stands for whether a node's channels come last."""
        row = operator(node)
        if node in self._kernels.layers:
            return node if row.is_convolution else _FLOATS
        if _is_pool(node):
            return self._codes(node)
        either = _is_elementwise(node) or node in self._kernels.joins or row.moves in _MOVES
        return ("layout", node) if either and node in self._nodes else _FLOATS

    def _layer_before(self, node: ir.Node | None) -> ir.Node | None:
        """Return the layer from which a node's first input comes."""
        while node is not None and node not in self._kernels.layers:
            value = node.inputs[0] if node.inputs else None
            node = None if value is None else value.producer()
        return node

    def _written(self, value: ir.Value) -> ir.Value:
        """Return a value after the activation that is computed along with it."""
        readers = [use.node for use in value.uses()]
        alone = len(readers) == 1 and readers[0] in self._kernels.absorbed
        return readers[0].outputs[0] if alone else value


def _is_pool(node: ir.Node | None) -> bool:
    row = operator(node)
    return row.moves == "some" and row.family == "spatial"


def _is_elementwise(node: ir.Node | None) -> bool:
    return operator(node).family in ("unary", "binary", "cast-like")
