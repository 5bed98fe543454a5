"""Find the layers of an ONNX IR graph, and ask calibration about what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.stored_weights import lookup, weight_source
from compressor.graph.values import (
    INTEGER_CODES,
    all_nodes,
    constant_of,
    input_of,
    origin,
    sole_reader,
    static_shape,
)
from compressor.types.layers import Layer, LayerKind
from compressor.types.statistics import Request


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
    if row.is_table and (len(shape) != 2 or not _holds_rows(node, source)):
        return None
    if row.is_table and operator(sole_reader(node.outputs[0])).dequantizes:
        return None  # the scales of a table's codes are looked up beside them
    # The third input of an integer product is a zero point.
    bias = None if row.integer else input_of(node, 2)
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
        output=(_rescaled(node.outputs[0]) if row.unscaled else node.outputs[0]).name or "",
        node=node.name or "",
    )


def _holds_rows(node: ir.Node, source: ir.Value) -> bool:
    """Whether a table holds floats, or codes of floats."""
    if source.dtype is not None and source.dtype.is_floating_point():
        return True
    readers = [use.node for use in node.outputs[0].uses()]
    return (
        source.dtype in INTEGER_CODES
        and lookup(node) is None
        and any(operator(reader).decodes or operator(reader).dequantizes for reader in readers)
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
        return node, input_of(node, 2)
    value = node.outputs[0]
    add = sole_reader(value)
    if add is None or operator(add).arithmetic != "+" or add.graph is not node.graph:
        return node, None
    other = next(v for v in add.inputs if v is not value)
    return (add, other) if other is not None and is_bias(other, layer) else (node, None)


def is_bias(value: ir.Value, layer: Layer) -> bool:
    """Whether a value is stored, one number for each row of a layer's weight."""
    return value.is_initializer() and static_shape(value) == (layer.rows,)


def layers_of(node: ir.Node) -> list[Layer]:
    """Return all layers of a node: a recurrent one has a weight for its input and for its state.

    The integer form of a recurrent node has its weights transposed.
    """
    product, row = layer_of(node), operator(node)
    layers = [] if product is None else [product]
    for index in (1, 2) if row.recurrent else ():
        source, _ = weight_source(node.inputs[index])
        shape = None if source is None else static_shape(source)
        if source is None or not source.name or source.dtype is None or shape is None:
            continue
        kept = (v for i, v in enumerate(node.inputs) if v is not None and i != index)
        layers.append(
            Layer(
                name=layer_name(source.name),
                kind=cast("LayerKind", row.recurrent),
                weight=source.name,
                shape=shape,
                dtype=source.dtype.numpy().name,
                transposed=row.integer,
                inputs=tuple(v.name or "" for v in kept),
                output=next((v.name for v in node.outputs if v.name), ""),
                node=node.name or "",
            )
        )
    return layers


def layers_with_nodes(model: ir.Model) -> Iterator[tuple[Layer, ir.Node]]:
    """Yield every layer and its node in the order of execution, subgraphs included.

    The weights of recurrent nodes are not among them, see :func:`layers_of`.
    """
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
    for node in all_nodes(model.graph):
        for layer in layers_of(node):
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
