"""What speaks against integers in a layer: where it lies, how it computes, who reads its weight."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from compressor.graph.blocks import values_read
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator
from compressor.graph.values import INTEGER_CODES, constant_of
from compressor.models.layer_uses import LOOKED_UP, MIXED, small_table
from compressor.passes.quantize.static.placement import Profile, computed_inputs
from compressor.types.layers import Layer

_CODE_TYPES = frozenset(code.numpy().name for code in INTEGER_CODES)
_COMPUTED = "its weight is computed or has other readers"


def end_layers(model: ir.Model, readers: Mapping[ir.Node, Layer]) -> frozenset[str]:
    """Return the layers that no other one comes before, and those that none comes after.

    Args:
        model: sorted topologically, as ONNX wants it.
        readers: the layer that each node multiplies with; tables are no layers here.
    """
    nodes = list(model.graph)
    names = {node: x.name for node, x in readers.items() if not x.is_table}
    ends: set[str] = set()
    for ordered, read, written in (
        (nodes, lambda node: set(values_read(node)), lambda node: set(node.outputs)),
        (nodes[::-1], lambda node: set(node.outputs), lambda node: set(values_read(node))),
    ):
        passed: set[ir.Value] = set()
        for node in ordered:
            follows = not passed.isdisjoint(read(node))
            if node in names and not follows:
                ends.add(names[node])
            if node in names or follows:
                passed |= written(node)
    return frozenset(ends)


def feeds_steep(node: ir.Node) -> bool:
    """Whether all that a layer gives ends, through squares and sums, in a root or a logarithm.

    So magnitudes of a spectrum are computed. Roundings cancel out in the sums of a later layer, but
    their squares do not: small values are lifted, and a root or a logarithm makes that large.
    """
    known: dict[tuple[ir.Value, bool], bool] = {}

    def ends(value: ir.Value, squared: bool) -> bool:
        if (value, squared) not in known:
            readers = {use.node for use in value.uses()}
            goes_on = bool(readers) and not value.is_graph_output()
            known[value, squared] = goes_on and all(passes(r, squared) for r in readers)
        return known[value, squared]

    def passes(reader: ir.Node, squared: bool) -> bool:
        row, computed = operator(reader), computed_inputs(reader)
        if row.steep:
            return True
        one = len(computed) == 1
        row_squares = row.squares or (row.arithmetic == "*" and one and _is_alone(reader))
        if row.family == "binary":
            keeps = row.arithmetic in ("+", "-") or one
        elif row.is_product:
            keeps = squared and one
        else:
            keeps = bool(row.moves) or row.zeros == "bounds" or row.rectifies
            keeps = keeps or (not row.activation and (row.adds or row.passes_factor))
        return keeps and all(ends(v, squared or row_squares) for v in reader.outputs)

    return all(ends(value, False) for value in node.outputs)


def _is_alone(node: ir.Node) -> bool:
    """Whether a node's inputs are one value."""
    return len(set(node.inputs)) == 1


def no_kernel(layer: Layer, node: ir.Node | None, profile: Profile) -> str:
    """Return why no integer kernel computes a layer at a node; empty if one does."""
    if layer.dtype in _CODE_TYPES:
        return "it is quantized already"
    if node is None:
        return "the weight of a recurrent layer"
    if node.op_type not in profile.layers:
        other = (small_table(layer) or LOOKED_UP) if layer.is_table else "no integer kernel"
        return profile.kept.get(node.op_type, other)
    if layer.is_linear and (
        node.attributes.get_float("alpha", 1.0) != 1.0
        or node.attributes.get_float("beta", 1.0) != 1.0
        or node.attributes.get_int("transA", 0) != 0
    ):
        return "its alpha, beta or transA has no integer kernel"
    weight = node.inputs[1]
    if weight is None or constant_of(weight) is None or weight.is_graph_output():
        return _COMPUTED
    readers = [layer_of(use.node) for use in weight.uses() if use.idx == 1]
    if len(readers) < len(weight.uses()):
        return _COMPUTED
    return MIXED if any(r and r.output_axis != layer.output_axis for r in readers) else ""
