"""How stored weights reach the nodes that read them: as codes, cast, turned, or looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from compressor.graph.operators import operator, operator_named
from compressor.graph.values import INTEGER_CODES, all_nodes, sole_reader, static_shape
from compressor.types.tensors import Array

_WEIGHTS = {
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
}
CODES = INTEGER_CODES | {
    *(ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT4E2M1),
    *(ir.DataType.INT16, ir.DataType.UINT16),
}
"""Element types that hold the codes of quantized weights, floats included."""

_BYTE = 8
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


def is_quantized(model: ir.Model) -> bool:
    """Whether weights or activations are quantized, in whatever form: Q/DQ, integer operators."""
    for node in all_nodes(model.graph):
        row = operator_named(node.op_type)
        if row.family == "quantization" or row.integer or row.packed:
            return True
        if node.op_type.startswith(("QLinear", "DynamicQuantize")):
            return True
        first = node.inputs[0] if node.inputs and row.decodes else None
        if first is not None and first.is_initializer() and first.dtype in CODES:
            return True
    return False


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


def computed_weight(model: ir.Model) -> str | None:
    """Return the initializer behind the first weight that constant expressions compute.

    Passes that look for layers do not see through these; ``fuse`` computes them once. ``None`` if
    there is no such weight.
    """
    for node in all_nodes(model.graph):
        row = operator(node)
        weight = node.inputs[row.weight] if len(node.inputs) > row.weight else None
        if row.layer is not None and weight is not None and weight_source(weight)[0] is None:
            stored = _computed_from(weight)
            if stored:
                return max(stored, key=lambda v: prod(static_shape(v) or (0,))).name
    return None


def _computed_from(value: ir.Value) -> list[ir.Value]:
    """Return the initializers that a value is computed from; none if it is from something else."""
    found: dict[str | None, ir.Value] = {}
    pending, seen = [value], {value}
    while pending:
        value = pending.pop()
        node = value.producer()
        if value.is_initializer() and not value.is_graph_input():
            found[value.name] = value
        elif node is None or operator(node).random or operator(node).family == "quantization":
            return []
        else:
            new = [v for v in node.inputs if v is not None and v not in seen]
            seen.update(new)
            pending += new
    return list(found.values())


def sole_path(node: ir.Node) -> list[ir.Node] | None:
    """Return the nodes that move a layer's weight on its way to its node, in order.

    ``None`` if the weight is computed in another way, or read by others as well.
    """
    path: list[ir.Node] = []
    value = node.inputs[1]
    while value is not None:
        if sole_reader(value) is None:
            return None
        if value.is_initializer():
            return path[::-1]
        maker = value.producer()
        if maker is None or operator(maker).moves not in ("same", "order"):
            return None
        path.append(maker)
        value = maker.inputs[0]
    return None


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
    # Scales of rows are looked up as well, and those of integer recurrent nodes are their inputs.
    readers = [operator(use.node) for use in value.uses()]
    if value.graph is not None and any(row.is_table or row.recurrent for row in readers):
        sides = {f"{value.name}{end}" for end in ("_scale", "_zero_point")}
        names += sorted(sides & set(value.graph.initializers) - set(names))
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


def unpacked(parts: Sequence[ir.TensorProtocol | None], sizes: Mapping[str, int]) -> Array:
    """Return the weight of a product whose codes share bytes, float32 ``[columns, rows]``.

    Args:
        parts: codes, scales and, if there are any, zero points.
        sizes: the attributes ``K``, ``N``, ``bits`` and ``block_size`` of ``MatMulNBits``.
    """
    codes, scale, zero = (None if part is None else part.numpy() for part in parts)
    rows, bits = sizes["N"], sizes["bits"]
    levels = _levels(np.asarray(codes).reshape(rows, -1), bits).astype(np.float32)
    levels = levels.reshape(rows, -1, sizes["block_size"])
    blocks = levels.shape[1]
    centre: Array = np.array(1 << (bits - 1), np.float32)
    if zero is not None and zero.dtype == np.uint8:
        centre = _levels(zero.reshape(rows, -1), bits)[:, :blocks, None].astype(np.float32)
    elif zero is not None:
        centre = zero.astype(np.float32).reshape(rows, blocks, 1)
    scaled = (levels - centre) * np.asarray(scale).astype(np.float32).reshape(rows, blocks, 1)
    return np.ascontiguousarray(scaled.reshape(rows, -1)[:, : sizes["K"]].T)


def _levels(packed: Array, bits: int) -> Array:
    """Return the codes in bytes, ``[rows, codes]``, the low bits first."""
    shifts = np.arange(0, _BYTE, bits, dtype=np.uint8)
    return (packed[:, :, None] >> shifts & ((1 << bits) - 1)).reshape(len(packed), -1)
