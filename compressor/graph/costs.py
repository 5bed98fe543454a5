"""What a model costs: parameters, bytes, multiply-accumulates, and each node's memory traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TypeAlias

import onnx_ir as ir

from compressor.graph.bodies import in_turns, turns_of
from compressor.graph.editing import inner_nodes
from compressor.graph.layers import layer_of
from compressor.graph.operators import operator, operator_named
from compressor.graph.plain import with_shapes
from compressor.graph.stored_weights import looked_up, side_tensors, weight_source
from compressor.graph.values import INTEGER_CODES, all_nodes, dims, origin, static_shape
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.tensors import Batch

Sample: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of a model's inputs, by name."""

_NO_SAMPLE: Sample = {}
_RECURRENT_SIDES = 8  # the first scale among the inputs of an integer recurrent node


def initializer_bytes(model: ir.Model) -> int:
    """Bytes of all initializers as stored (codes narrower than a byte are packed)."""
    return sum(
        v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None
    )


def side_bytes(model: ir.Model) -> int:
    """Bytes of the initializers that are scales, zero points and tables of codes."""
    side, values = _quantization_parameters(model), model.graph.initializers
    stored = (values[name].const_value for name in side if name in values)
    return sum(tensor.nbytes for tensor in stored if tensor is not None)


def parameters(model: ir.Model) -> int:
    """Number of weights: elements of initializers that are floating point or quantized codes.

    Scales, zero points and tables of codes are not counted, nor are integer constants such as
    shapes, single numbers, and the running statistics of batch-norm, which nobody trained.
    """
    side = _quantization_parameters(model)
    for node in all_nodes(model.graph):
        if operator(node).running_statistics:
            side.update(v.name for v in node.inputs[3:] if v is not None and v.name)
    packed = _packed(model)
    total = 0
    for name, value in model.graph.initializers.items():
        shape = static_shape(value)
        if name in side or not shape or value.dtype is None:
            continue
        if name in packed:
            total += packed[name]
        elif value.dtype.is_floating_point() or _is_codes(value):
            total += prod(shape)
    return total


def node_macs(node: ir.Node) -> int:
    """Multiply-accumulates of one node for one sample; 0 where shapes are not known.

    Dynamic axes count as 1, those too that are a multiple of the samples, such as ``12*batch``:
    :func:`at_lengths` makes numbers of these. Convolutions, matrix products and recurrences are
    counted.
    """
    row = operator_named(node.op_type)
    if row.recurrent:
        return sum(recurrent_macs(node))
    if row.packed:
        given = None if node.inputs[0] is None else dims(node.inputs[0])
        return 0 if given is None else prod(given) * node.attributes.get_int("N", 0)
    if row.layer is None or row.is_table or not node.outputs:
        return 0
    output = dims(node.outputs[0])
    if output is None:
        return 0
    if row.transposed_weight:
        source, _ = weight_source(node.inputs[1])
        entry = None if node.inputs[0] is None else dims(node.inputs[0])
        weight = None if source is None else static_shape(source)
        return 0 if entry is None or weight is None else prod(entry) * prod(weight[1:])
    layer = layer_of(node)
    if layer is not None:
        return prod(output) * layer.columns
    if row.is_convolution:  # of a weight that the graph computes
        weight = None if node.inputs[1] is None else dims(node.inputs[1])
        return 0 if weight is None else prod(output) * prod(weight[1:])
    first = None if node.inputs[0] is None else dims(node.inputs[0])
    return 0 if not first else prod(output) * first[-1]


def recurrent_macs(node: ir.Node) -> tuple[int, int]:
    """Return a recurrent node's multiply-accumulates for one sample: of its input, of its state.

    As many steps are counted as its input's shape states; of unknown shapes, none.
    """
    shapes = [None if value is None else dims(value) for value in node.inputs[:3]]
    entry, weight, matrix = (shape or (0,) for shape in shapes)
    return prod(entry[:2]) * prod(weight), prod(entry[:2]) * prod(matrix)


def macs(model: ir.Model, sample: Sample = _NO_SAMPLE) -> int:
    """Multiply-accumulates of the whole graph for one sample.

    The body of a loop counts as often as it is computed; see :func:`turn_notes`. Axes that the
    graph leaves open count as in ``sample``, shapes of inputs by name, and as 1 without.

    Example:
        >>> f"{macs(ir.load('model.onnx')):,}"
        '40,813,184'
    """
    graph = at_lengths(model, sample).graph
    return sum(turns * node_macs(node) for node, turns in in_turns(graph) if turns)


def at_lengths(model: ir.Model, sample: Sample = _NO_SAMPLE) -> ir.Model:
    """Return a model with the shapes that it has for one sample; itself if costs are the same.

    Open axes of inputs are as in ``sample``, and 1 without. If a window is longer than that, the
    model is returned as it is. Its nodes have the order of those of ``model``.
    """
    inputs = {v.name or "": tuple(v.shape) for v in model.graph.inputs if v.shape is not None}
    later = (axis for name in inputs.keys() & sample.keys() for axis in inputs[name][1:])
    if all(isinstance(axis, int) for axis in later) and not _has_other_lengths(model):
        return model
    lengths = {
        name: tuple(
            axis if isinstance(axis, int) else length
            for axis, length in zip(axes, sample.get(name, (1,) * len(axes)), strict=True)
        )
        for name, axes in inputs.items()
    }
    sized = with_shapes(model, lengths)
    shapes = (dims(node.outputs[0]) for node in filter(_multiplies, sized.graph))
    return sized if all(min(shape or (1,)) > 0 for shape in shapes) else model


def _has_other_lengths(model: ir.Model) -> bool:
    """Whether a product has open axes that are no input's, which may count more than 1."""
    own = {length for value in model.graph.inputs for length in value.shape or ()}
    products = filter(_multiplies, all_nodes(model.graph))
    values = (v for node in products for v in (*node.inputs, *node.outputs) if v is not None)
    return any(
        v.shape is None
        or any(not isinstance(d, int) and (d.value is None or d not in own) for d in v.shape)
        for v in values
    )


def _multiplies(node: ir.Node) -> bool:
    row = operator_named(node.op_type)
    weighted = row.layer is not None and not row.is_table
    return weighted or row.packed or row.recurrent is not None


def turn_notes(model: ir.Model) -> list[str]:
    """Return a sentence for each loop whose work is counted once, for want of a known number."""
    return [
        f"MACs in {node.op_type} {node.name or node.outputs[0].name!r} count once: values decide "
        "how many turns it takes"
        for node in all_nodes(model.graph)
        if turns_of(node) is None and any(map(node_macs, inner_nodes(node)))
    ]


def _is_codes(value: ir.Value) -> bool:
    """Whether integers are the codes of a parameter.

    Codes are dequantized, or at most a byte wide and at least a matrix.
    """
    dequantized = any(operator(u.node).dequantizes and u.idx == 0 for u in value.uses())
    narrow = value.dtype in INTEGER_CODES and value.shape is not None and len(value.shape) >= 2
    return dequantized or narrow


def _packed(model: ir.Model) -> dict[str, int]:
    packed: dict[str, int] = {}
    for node in all_nodes(model.graph):
        if (
            operator_named(node.op_type).packed
            and len(node.inputs) > 1
            and node.inputs[1] is not None
        ):
            count = node.attributes.get_int("N", 0) * node.attributes.get_int("K", 0)
            packed[node.inputs[1].name or ""] = count
            continue
        codes = looked_up(node)
        table = node.inputs[0] if codes is not None else None
        if codes is not None and table is not None:
            each = prod((static_shape(table) or ())[1:])
            packed[codes.name or ""] = prod(static_shape(codes) or ()) * each
    return packed


def _quantization_parameters(model: ir.Model) -> set[str]:
    initializers = model.graph.initializers
    names = {f"{name}{end}" for name in initializers for end in ("_scale", "_zero_point")} & set(
        initializers
    )
    for node in all_nodes(model.graph):
        if operator_named(node.op_type).family == "quantization":
            names.update(v.name for v in node.inputs[1:] if v is not None and v.name)
        elif looked_up(node) is not None and node.inputs[0] is not None:
            names.add(node.inputs[0].name or "")
        elif operator(node).recurrent and operator(node).integer:
            names.update(v.name for v in node.inputs[_RECURRENT_SIDES:] if v is not None and v.name)
    return names


@dataclass(frozen=True)
class Traffic:
    """Elements and bytes that pass between a node and the memory.

    Attributes:
        weights: elements of weights that are read.
        weight_bytes: bytes of them, with their scales.
        activations: elements of activations that are read and written.
        activation_bytes: bytes of them.
        integer: the activation that the node reads is stored as integers.
    """

    weights: int = 0
    weight_bytes: float = 0.0
    activations: int = 0
    activation_bytes: float = 0.0
    integer: bool = False

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.weight_bytes + self.activation_bytes


def node_traffic(node: ir.Node) -> Traffic | None:
    """Return the memory traffic of one node; ``None`` where a shape is unknown.

    Args:
        node: a node whose graph has no dynamic axes; any that remain count as 1.
    """
    if operator(node).free or _is_fused(node):
        return Traffic()
    weights = [0, 0.0]
    entering: list[ir.Value] = []
    for value in node.inputs:
        source = None if value is None else weight_source(value)[0]
        if source is not None and source.const_value is not None:
            size, moved = _read(node, source)
            weights = [weights[0] + size, weights[1] + moved]
        elif value is not None:
            entering.append(origin(value, lambda maker: operator(maker).dequantizes))
    activations = [*entering, *(_written(value) for value in node.outputs if value.name)]
    shapes = [dims(value) for value in activations]
    if any(shape is None for shape in shapes):
        return None
    sizes = [prod(shape) for shape in shapes if shape is not None]
    widths = [4.0 if value.dtype is None else value.dtype.itemsize for value in activations]
    first = entering[0].dtype if entering else None
    return Traffic(
        weights=int(weights[0]),
        weight_bytes=weights[1],
        activations=sum(sizes),
        activation_bytes=sum(n * w for n, w in zip(sizes, widths, strict=True)),
        integer=first is not None and first.is_integer(),
    )


def _is_fused(node: ir.Node) -> bool:
    """Whether a runtime computes a node together with its producer or its reader."""
    if not node.inputs or node.inputs[0] is None:
        return False
    if operator(node).quantizes:
        return not node.inputs[0].is_graph_input()
    if operator(node).dequantizes:
        return not node.outputs[0].is_graph_output()
    maker = node.inputs[0].producer()
    alone = len(tuple(node.inputs[0].uses())) == 1
    before = operator(maker)
    return operator(node).fused and alone and (before.is_product or before.fused)


def _read(node: ir.Node, source: ir.Value) -> tuple[int, float]:
    """Return how many elements of an initializer a node reads, and their bytes."""
    assert source.const_value is not None
    size, stored = prod(static_shape(source) or ()), float(source.const_value.nbytes)
    if operator(node).is_table and layer_of(node) is not None:
        rows = prod(dims(node.outputs[0]) or ())  # the table is not read as a whole
        return rows, rows * stored / max(size, 1)
    if operator_named(node.op_type).packed:
        size = node.attributes.get_int("N", 0) * node.attributes.get_int("K", 0)
        return (size if source is node.inputs[1] else 0), stored
    return size, stored + sum(_side_bytes(node, source))


def _side_bytes(node: ir.Node, source: ir.Value) -> Iterator[int]:
    graph = node.graph
    for name in side_tensors(source):
        value = None if graph is None else graph.initializers.get(name)
        if value is not None and value.const_value is not None:
            yield value.const_value.nbytes


def _written(value: ir.Value) -> ir.Value:
    """Return the form in which an activation that a node writes is stored."""
    while len(uses := tuple(value.uses())) == 1:
        row = operator(uses[0].node)
        if not (row.fused or row.quantizes):
            break
        value = uses[0].node.outputs[0]
    return value


def model_bytes(carrier: Carrier) -> int:
    """Bytes of all tensors; codes are packed."""
    if Capability.GRAPH in carrier.offers:
        return initializer_bytes(carrier.graph())
    return sum(tensor.nbytes for tensor in carrier.tensors().values())


def model_parameters(carrier: Carrier) -> int:
    """Number of weights."""
    if Capability.GRAPH in carrier.offers:
        return parameters(carrier.graph())
    floating = (t for t in carrier.tensors().values() if t.dtype.is_floating_point)
    return sum(tensor.elements for tensor in floating)


def model_macs(carrier: Carrier, sample: Sample = _NO_SAMPLE) -> int | None:
    """Return :func:`macs`; ``None`` where no graph says how weights are used."""
    return macs(carrier.graph(), sample) if Capability.GRAPH in carrier.offers else None


def batch_macs(carrier: Carrier, batch: Batch) -> float:
    """Multiply-accumulates for a batch, whose other lengths count as they are.

    The first axis counts in proportion to what the graph states, or to 1 where that is open.
    """
    counts, lengths = [1.0], dict[str, tuple[int, ...]]()
    for spec in carrier.inputs:
        if spec.shape and (shape := batch[spec.name].shape):
            stated = spec.shape[0] if isinstance(spec.shape[0], int) else 1
            counts.append(shape[0] / max(stated, 1))
            lengths[spec.name] = (stated, *shape[1:])
    return macs(carrier.graph(), lengths) * max(counts)


def size_notes(before: Carrier, after: Carrier, sample: Sample) -> list[str]:
    """Return how a model's counts have changed, one sentence each; none for what is not known."""
    notes, work = [], partial(model_macs, sample=sample)
    for name, count in (("MACs", work), ("parameters", model_parameters)):
        old, new = count(before), count(after)
        if old and new is not None:
            notes.append(f"{name} {old:,} -> {new:,} ({100 * new / old:.1f} %)")
    return notes


def layer_bytes(carrier: Carrier) -> dict[str, int]:
    """Bytes of each layer's weight and bias with their scales and zero points, by layer."""
    if Capability.GRAPH not in carrier.offers:
        stored = carrier.tensors()
        return {
            layer.name: sum(stored[n].nbytes for n in _parameters(layer) if n in stored)
            for layer in carrier.layers()
        }
    initializers = carrier.graph().graph.initializers
    sizes: dict[str, int] = {}
    for layer in carrier.layers():
        names = _parameters(layer)
        names += [s for n in list(names) for s in side_tensors(initializers[n])]
        values = (initializers[n].const_value for n in dict.fromkeys(names) if n in initializers)
        sizes[layer.name] = sum(t.nbytes for t in values if t is not None)
    return sizes


def _parameters(layer: Layer) -> list[str]:
    return [layer.weight, *([layer.bias] if layer.bias else [])]


BARE = "a bare checkpoint has no graph and cannot be run"
FOREIGN = "it has operators that ONNX Runtime does not know and cannot be run"


def cannot_run(carrier: Carrier) -> str:
    """Return why a model that does not offer ``run`` cannot be run."""
    if Capability.GRAPH not in carrier.offers:
        return BARE
    return FOREIGN
