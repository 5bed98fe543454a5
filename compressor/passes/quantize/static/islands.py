"""Which layers and joins compute on codes: the choice of least predicted time.

Where codes meet floats, values are converted, which takes time. So the choice is one for the whole
graph: a minimum cut separates what computes on codes from what computes in floating point, and the
edges that are cut add up to the time that the choice takes. A value that several nodes read is
converted once. Where one file is for several kinds of CPUs, the choice is the one of least mean
time over the float model's, and none of them is predicted to be slower than that. Codes have to
save enough time to be worth what their rounding loses: see :mod:`.prices`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from compressor.passes.quantize.static.cuts import Kernels, Network, Sides, is_pool
from compressor.passes.quantize.static.latency import CostModel, Shapes, typical_shapes
from compressor.passes.quantize.static.placement import Profile, absorbing, computes_join, place
from compressor.passes.quantize.static.prices import WORTH, behind_averages, last, prices
from compressor.types.layers import Layer


@dataclass(frozen=True)
class Choice:
    """Which layers stay in floating point since integers gain too little.

    Attributes:
        nodes: nodes without a weight that compute on codes, or move them.
        floats: names of the layers that stay, each with the reason.
        ratios: the predicted time of the network over its own in floats, by kind of CPU.
        integer_ratios: the same, if all layers were integer.
    """

    nodes: frozenset[ir.Node]
    floats: Mapping[str, str]
    ratios: Mapping[str, float]
    integer_ratios: Mapping[str, float]

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
    if not profile.latencies:
        return None
    shapes = typical_shapes(model, samples)
    kernels = kernels_of(model, profile, readers, names)
    if not kernels.layers or any(n.outputs[0].name not in shapes for n in kernels.layers):
        return None
    costs = [CostModel(x, shapes) for x in profile.latencies]
    averages = behind_averages(model.graph, readers, shapes)
    dear = averages | last(model.graph, kernels)
    network = Network(model.graph, kernels, costs, prices(kernels, dear))
    layers = frozenset(kernels.layers)
    pinned = frozenset(n for n, name in kernels.layers.items() if name in forced)
    usual = network.cut(layers | kernels.usual, kernels.joins - kernels.usual)
    chosen = _chosen(network, pinned, dear)
    same = chosen.integer & (layers | kernels.joins) == usual.integer & (layers | kernels.joins)
    if same and not any(is_pool(n) and n not in usual.integer for n in model.graph):
        return None  # everything that moves elements between codes moves codes
    reasons: dict[ir.Node, str] = {}
    for island in network.islands(chosen):
        ratio, saved = network.turned(chosen, island)
        for node in island:
            reasons[node] = _reason(ratio, saved, behind=node in averages)
    cpus = [latency.title for latency in profile.latencies]
    return Choice(
        nodes=chosen.integer - layers,
        floats={name: reasons[n] for n, name in kernels.layers.items() if n in reasons},
        ratios=dict(zip(cpus, chosen.ratios, strict=True)),
        integer_ratios=dict(zip(cpus, usual.ratios, strict=True)),
    )


def _reason(ratio: float, saved: float, *, behind: bool) -> str:
    """Say why a layer stays: by the time of its part of the network, and what that would save."""
    if ratio >= 1:
        return f"faster as floats: as integers, {ratio:.2f} x the time (predicted)"
    where = "behind an average, whose range is uncertain, " if behind else ""
    return f"{where}integers save too little: {100 * saved:.1f} % of the time (predicted)"


def _chosen(network: Network, pinned: Collection[ir.Node], dear: Collection[ir.Node]) -> Sides:
    """Return the choice that is worth its rounding; all floats if it hardly takes less time.

    What is dear has its own price beside that. A choice that is slower than floats
    on some kind of CPU is none, unless floats are no choice.
    """
    floats = network.cut(pinned, network.layers - {*pinned})
    best = network.cut(pinned)
    owed = WORTH * (1 + len(best.integer & {*dear} - {*pinned}))
    worth = floats.ratio - best.ratio > owed and _is_no_slower(best, floats)
    return best if worth else floats


def _is_no_slower(choice: Sides, floats: Sides) -> bool:
    pairs = zip(choice.ratios, floats.ratios, strict=True)
    return all(ratio <= max(other, 1.0) for ratio, other in pairs)


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
