"""What computing on codes must save to be worth its rounding: prices in shares of the time.

Noise of independent roundings adds up, so that each operator on codes takes about as much of the
signal as any other. All of them together have to save a twentieth of the time, and each of them its
part of that. So a patch of codes that hardly saves time stays in floats, and the outputs err less.

Behind an average over all places, one operator has to save as much alone. What reads a map has
thousands of numbers of each sample, which tell a range, and their errors cancel out in the average.
What reads the average has one number a channel: a later sample leaves the range that calibration
saw by as much as samples differ from each other, and nothing averages that error. The same holds
where no layer follows, such as for an average that is the output: what is rounded there is seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import onnx_ir as ir

from compressor.graph.blocks import values_read
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.passes.quantize.static.cuts import Kernels
from compressor.passes.quantize.static.latency import Shapes
from compressor.passes.quantize.static.placement import computed_inputs
from compressor.types.layers import Layer

WORTH = 0.05
"""What codes must save of the float model's time; predictions are not more exact."""


def prices(kernels: Kernels, dear: Collection[ir.Node]) -> dict[ir.Node, float]:
    """Return what each operator on codes must save, over the time of the float model.

    Args:
        kernels: what may be done with the nodes of the graph.
        dear: those that have to save it all: of :func:`behind_averages` and :func:`last`.
    """
    nodes = [*kernels.layers, *kernels.joins]
    return {node: WORTH if node in dear else WORTH / len(nodes) for node in nodes}


def last(graph: ir.Graph, kernels: Kernels) -> frozenset[ir.Node]:
    """Return the operators without a weight that may be integer and that no layer follows."""
    followed, found = set[ir.Value](), set[ir.Node]()
    for node in reversed(graph):
        if layer_of(node) is not None or not followed.isdisjoint(node.outputs):
            followed.update(values_read(node))
        elif node in kernels.joins:
            found.add(node)
    return frozenset(found)


def behind_averages(
    graph: ir.Graph, readers: Mapping[ir.Node, Layer], shapes: Shapes
) -> frozenset[ir.Node]:
    """Return the nodes with a weight that read one number a channel behind an average of all."""
    averaged, found = set[ir.Value](), set[ir.Node]()
    for node in graph:
        read = {v for v in computed_inputs(node) if v.dtype in (None, ir.DataType.FLOAT)}
        behind = bool(read) and read <= averaged
        if behind or _averages(node, shapes):
            averaged.update(node.outputs)
        layer = readers.get(node)
        if layer is not None and behind and _has_one_place(node, layer, shapes):
            found.add(node)
    return frozenset(found)


def _averages(node: ir.Node, shapes: Shapes) -> bool:
    """Whether a node pools all places of what it reads, or sums over an axis."""
    family = operator(node).family
    if family not in ("spatial", "reduction") or node.inputs[0] is None:
        return False
    before, after = (shapes.get(v.name or "", ()) for v in (node.inputs[0], node.outputs[0]))
    if family == "spatial":
        return prod(after[2:]) == 1 < prod(before[2:])
    return prod(after) < prod(before)


def _has_one_place(node: ir.Node, layer: Layer, shapes: Shapes) -> bool:
    assert node.inputs[0] is not None
    shape = shapes.get(node.inputs[0].name or "", ())
    return prod(shape[2:] if layer.is_convolution else shape[1:-1]) == 1
