"""Find the layers of an ONNX IR graph, and ask calibration about what they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from compressor.graph.operators import operator, operator_named
from compressor.graph.values import all_nodes, constant_of, origin, sole_reader, static_shape
from compressor.types.layers import Layer
from compressor.types.statistics import Request

_WEIGHTS = {
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
}
_PLACES = {ir.DataType.UINT2, ir.DataType.UINT4, ir.DataType.UINT8}


@dataclass(frozen=True)
class Lookup:
    """Codes whose meaning a ``Gather`` looks up in a table.

    Attributes:
        table: the initializer of the values; with two axes, a code stands for several numbers.
        offsets: the initializer added to the codes, where parts of the weight use different parts
            of the table.
    """

    codes: ir.Value
    table: ir.Value
    offsets: ir.Value | None


def weight_source(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """Follow a weight back to its initializer.

    Quantization (written out as arithmetic, too), casts, transposes and lookups of codes in a table
    are seen through.

    Returns:
        The initializer (``None`` if the value is computed from an input) and whether its last
        two axes are swapped on the way.
    """
    swapped = False
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or not node.inputs:
            return None, swapped
        row = operator_named(node.op_type)
        if row.moves == "order":
            perm = node.attributes.get_ints("perm", None)
            if perm is not None and list(perm) != [1, 0]:
                return None, swapped
            swapped = not swapped
        elif row.decodes and row.moves != "type":
            return _written_out(node), swapped
        elif row.family != "quantization" and row.moves not in ("same", "type"):
            return looked_up(node), swapped
        value = node.inputs[0]
    return value, swapped


def _written_out(node: ir.Node) -> ir.Value | None:
    """Return the codes that are dequantized by arithmetic on constants, or ``None``.

    In place of ``DequantizeLinear`` stand ``Cast``, ``Sub``, ``Mul``, and ``Reshape`` for groups.
    """
    value: ir.Value | None = node.outputs[0]
    while value is not None and not value.is_initializer():
        maker = value.producer()
        if maker is None or not maker.inputs:
            return None
        if not operator(maker).decodes:
            return looked_up(maker)
        if any(v is None or not _is_constant(v) for v in maker.inputs[1:]):
            return None
        value = maker.inputs[0]
    if value is None or value.dtype is None or value.dtype in _WEIGHTS:
        return None
    return value


def _is_constant(value: ir.Value) -> bool:
    """Whether a value is computed from initializers alone, as the scales of codes are."""
    if value.is_initializer():
        return True
    maker = value.producer()
    row = operator(maker)
    if maker is None or not (row.decodes or row.is_table):
        return False
    return all(v is not None and _is_constant(v) for v in maker.inputs)


def looked_up(node: ir.Node | None) -> ir.Value | None:
    """Return the codes of a :func:`lookup`, or ``None``."""
    table_lookup = lookup(node)
    return None if table_lookup is None else table_lookup.codes


def lookup(node: ir.Node | None) -> Lookup | None:
    """Return how a ``Gather`` looks up the meaning of codes, or ``None`` for any other node.

    Clustered weights and numbers without an element type in the opset are stored like that:
    see :class:`compressor.graph.code_forms.CodeForm` and :mod:`compressor.graph.codebooks`.
    """
    if node is None or not operator(node).is_table or len(node.inputs) != 2:
        return None
    table, index = node.inputs
    if table is None or index is None or not table.is_initializer():
        return None
    cast, offsets = index.producer(), None
    if cast is not None and operator(cast).arithmetic == "+":
        index, offsets = cast.inputs
        if index is None or offsets is None or not offsets.is_initializer():
            return None
        cast = index.producer()
    if cast is None or operator(cast).moves != "type":
        return None
    if len(static_shape(table) or ()) not in (1, 2):
        return None
    codes = cast.inputs[0]
    stored = codes is not None and codes.is_initializer() and codes.dtype in _PLACES
    return Lookup(codes, table, offsets) if codes is not None and stored else None


def layer_name(weight: str) -> str:
    """Return the layer's name for a parameter's name."""
    return weight.removesuffix(".weight")


def layer_of(node: ir.Node) -> Layer | None:
    """Describe a node as a layer, or return ``None`` if no constant weight is multiplied there."""
    row = operator(node)
    kind, index = row.layer, row.weight
    if kind is None or len(node.inputs) <= index:
        return None
    source, swapped = weight_source(node.inputs[index])
    if source is None or source.name is None or source.dtype is None:
        return None
    shape = static_shape(source)
    if shape is None or len(shape) < 2 or (row.is_matmul and len(shape) != 2):
        return None
    if row.is_table and (len(shape) != 2 or not source.dtype.is_floating_point()):
        return None
    if row.is_table and operator(sole_reader(node.outputs[0])).dequantizes:
        return None  # the scales of a table's codes are looked up beside them
    # The third input of an integer product is a zero point.
    bias = node.inputs[2] if len(node.inputs) > 2 and not row.integer else None
    bias_source, _ = weight_source(bias)
    return Layer(
        name=layer_name(source.name),
        kind=kind,
        weight=source.name,
        shape=shape,
        dtype=source.dtype.numpy().name,
        transposed=_is_transposed(node, swapped),
        groups=node.attributes.get_int("group", 1),
        bias=None if bias_source is None else bias_source.name,
        inputs=tuple(
            v.name or "" for i, v in enumerate(node.inputs) if v is not None and i != index
        ),
        output=(_rescaled(node.outputs[0]) if row.integer else node.outputs[0]).name or "",
    )


def _is_transposed(node: ir.Node, swapped: bool) -> bool:
    row = operator(node)
    if row.is_matmul:
        return not swapped
    if row.is_product and not row.is_convolution:
        return (node.attributes.get_int("transB", 0) == 0) != swapped
    return False


def _rescaled(value: ir.Value) -> ir.Value:
    """Follow an integer product to the float value that its scales and bias make of it."""
    while len(uses := tuple(value.uses())) == 1:
        node = uses[0].node
        row = operator(node)
        if row.arithmetic == "+":  # the bias comes last
            biased = any(v is not None and v.is_initializer() for v in node.inputs)
            return node.outputs[0] if biased else value
        if row.moves != "type" and row.arithmetic != "*":
            break
        value = node.outputs[0]
    return value


def with_bias(node: ir.Node, layer: Layer) -> tuple[ir.Node, ir.Value | None]:
    """Return the last node of a product and its bias, which may be added by a node of its own."""
    if not layer.bias_is_separate:
        return node, node.inputs[2] if len(node.inputs) > 2 else None
    value = node.outputs[0]
    add = sole_reader(value)
    if add is None or operator(add).arithmetic != "+" or add.graph is not node.graph:
        return node, None
    other = next(v for v in add.inputs if v is not value)
    return (add, other) if other is not None and is_bias(other, layer) else (node, None)


def is_bias(value: ir.Value, layer: Layer) -> bool:
    """Whether a value is stored, one number for each row of a layer's weight."""
    return value.is_initializer() and static_shape(value) == (layer.rows,)


def layers_with_nodes(model: ir.Model) -> Iterator[tuple[Layer, ir.Node]]:
    """Yield every layer and its node in the order of execution, subgraphs included."""
    for node in all_nodes(model.graph):
        layer = layer_of(node)
        if layer is not None:
            yield layer, node


def graph_layers(model: ir.Model) -> tuple[Layer, ...]:
    """Return the layers, each weight once (a shared weight belongs to its first reader).

    Example:
        >>> [layer.name for layer in graph_layers(ir.load("model.onnx"))]
        ['conv1', 'fc']
    """
    seen: dict[str, Layer] = {}
    for layer, _ in layers_with_nodes(model):
        seen.setdefault(layer.weight, layer)
    return tuple(seen.values())


def activation_input(node: ir.Node) -> ir.Value | None:
    """Return the first input of a layer's node, unless it is a constant."""
    first = node.inputs[0]
    return first if constant_of(first) is None else None


def moment_request(
    layer: Layer, node: ir.Node, rows_per_column: int | None = None
) -> Request | None:
    """Ask for the second moment of what a layer multiplies its weight with.

    Args:
        rows_per_column: vectors for each of their elements after which observation stops;
            ``None`` leaves it to the observer.

    Returns:
        The request; ``None`` where the input is constant or transposed, or the layer is neither
        a matrix product nor a 2-D convolution with explicit padding.
    """
    value = activation_input(node)
    if value is None or not value.name or node.attributes.get_int("transA", 0) != 0:
        return None
    options: dict[str, Any] | None = {}
    if not layer.is_linear:
        options = _window(layer, node)
    if options is None:
        return None
    if rows_per_column is not None:
        options["rows_per_column"] = rows_per_column
    return Request(value.name, "second-moment", options)


def _window(layer: Layer, node: ir.Node) -> dict[str, Any] | None:
    """Describe a 2-D convolution's patches; ``None`` for others."""
    if layer.is_transposed_convolution or len(layer.shape) != 4:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    return {
        "kernel": tuple(layer.shape[2:]),
        "strides": tuple(node.attributes.get_ints("strides", (1, 1))),
        "pads": tuple(node.attributes.get_ints("pads", (0, 0, 0, 0))),
        "dilations": tuple(node.attributes.get_ints("dilations", (1, 1))),
        "groups": layer.groups,
    }


def side_tensors(value: ir.Value) -> list[str]:
    """Return the names of the scales, zero points and codebook that an initializer is read with.

    Tables of integers are not among them: all weights share one.
    """
    book = codebook_lookup(value)
    parts = [] if book is None else [book.table, book.offsets]
    names = [part.name or "" for part in parts if part is not None]
    for node in _dequantizers(value):
        for side in node.inputs[1:]:
            names += _stored_behind(side)
    return names


def _dequantizers(value: ir.Value) -> Iterator[ir.Node]:
    for use in value.uses():
        node = use.node
        if operator_named(node.op_type).dequantizes and use.idx == 0:
            yield node
        elif operator(node).moves == "type":
            for reader in node.outputs[0].uses():
                if looked_up(reader.node) is value:
                    yield from _dequantizers(reader.node.outputs[0])


def codebook_lookup(value: ir.Value) -> Lookup | None:
    """Return how an initializer's elements are looked up in a table of floats, or ``None``."""
    return next((x for x in lookups_of(value) if x.table.dtype in _WEIGHTS), None)


def lookups_of(value: ir.Value) -> Iterator[Lookup]:
    """Yield each way in which an initializer's elements are looked up in a table."""
    indices = [u.node.outputs[0] for u in value.uses() if operator(u.node).moves == "type"]
    places = (use.node for index in indices for use in index.uses())
    indices += [node.outputs[0] for node in places if operator(node).arithmetic == "+"]
    for use in (use for index in indices for use in index.uses()):
        candidate = lookup(use.node)
        if candidate is not None and candidate.codes is value:
            yield candidate


def _stored_behind(value: ir.Value | None) -> Iterator[str]:
    if value is None:
        return
    if value.is_initializer():
        if value.name:
            yield value.name
        return
    node = value.producer()
    if node is None:
        return
    codes, row = looked_up(node), operator(node)
    if codes is not None:
        yield codes.name or ""
    elif row.dequantizes or row.moves == "type" or row.arithmetic == "*":
        for part in node.inputs:
            yield from _stored_behind(part)


def _keeps_numbers(node: ir.Node) -> bool:
    return operator(node).moves in ("same", "type", "shape")


def index_limits(model: ir.Model) -> dict[str, int]:
    """Return for each input that picks rows of a table how many rows there are.

    Only tables whose number of rows is known, and inputs that reach ``Gather`` as they are,
    count; of several tables the smallest.
    """
    inputs = {value.name for value in model.graph.inputs if value.name}
    limits: dict[str, int] = {}
    for node in all_nodes(model.graph):
        if not operator(node).is_table or node.attributes.get_int("axis", 0) != 0:
            continue
        table, indices = node.inputs[:2]
        shape = None if table is None else static_shape(table)
        name = None if indices is None else origin(indices, _keeps_numbers).name
        if shape and len(shape) > 1 and name in inputs:
            limits[name] = min(limits.get(name, shape[0]), shape[0])
    return limits


def is_written_as_codes(value: ir.Value) -> bool:
    """Return whether the kernel that computes a value writes codes, whoever reads them."""
    node = value.producer()
    if operator(node).fused and node is not None and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or "layer-to-codes" not in operator(node).kernels.values():
        return False
    makers = [v.producer() for v in node.inputs if v is not None]
    return all(operator(maker).dequantizes for maker in makers)
