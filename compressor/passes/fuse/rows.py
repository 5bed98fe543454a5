"""Rules about the order of rows: what computes row by row takes rows in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import onnx_ir as ir

from compressor.graph.operators import operator
from compressor.graph.values import constant_of, input_of, is_op, static_shape
from compressor.passes.fuse.draft import Draft, private_maker, rank, replace, same_dim


def rows_in_order(node: ir.Node, draft: Draft) -> bool:
    """Transpose once what is transposed before and behind a product of rows.

    ``[B, H, T, D] -> [T, B, H, D] -> [T B, W] -> x W + b -> [T, B, W] -> [B, T, W]`` becomes
    ``[B, H, T, D] -> [B, T, H, D] -> [B T, W] -> x W + b -> [B, T, W]``.
    """
    if _perm(node) != [1, 0, 2]:
        return False
    apart = private_maker(node.inputs[0], node, "Reshape")
    chain = [] if apart is None else list(_rows_before(apart))
    together = chain[-1] if chain else None
    if apart is None or together is None or not is_op(together, "Reshape"):
        return False
    first = private_maker(together.inputs[0], together, "Transpose")
    before, rows = together.inputs[0], together.outputs[0]
    whole = apart.outputs[0].shape
    if first is None or before is None or before.shape is None or whole is None:
        return False
    if len(whole) != 3 or rank(rows) != 2 or len(before.shape) < 3:
        return False
    if not all(isinstance(d, int) for d in before.shape[2:]) or not _same_width(before, rows):
        return False
    # Both axes are those of the rows, if one has its length and the other what is left.
    if not any(same_dim(a, b) for a, b in zip(before.shape[:2], whole[:2], strict=True)):
        return False
    numbers = [d if isinstance(d, int) else -1 for d in (whole[1], whole[0], whole[2])]
    if numbers.count(-1) > 1 or 0 in numbers:
        return False
    perm = _perm(first)
    first.attributes["perm"] = ir.AttrInt64s("perm", [perm[1], perm[0], *perm[2:]])
    before.shape = ir.Shape([before.shape[1], before.shape[0], *before.shape[2:]])
    width = together.outputs[0].shape
    assert width is not None
    name = together.outputs[0].name
    flat = draft.constant([-1, int(width[1])], ir.DataType.INT64, f"{name}/shape")  # type: ignore[arg-type]
    together.replace_input_with(1, flat)
    together.attributes.pop("allowzero", None)
    shape = draft.constant(numbers, ir.DataType.INT64, f"{node.outputs[0].name}/shape")
    node.outputs[0].shape = ir.Shape([*before.shape[:2], whole[2]])
    replace(node, "Reshape", [apart.inputs[0], shape])
    return True


def _rows_before(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes before a node that compute row by row of a matrix, and what makes that."""
    before = private_maker(node.inputs[0], node)
    while before is not None:
        yield before
        row = operator(before)
        matrix = row.is_product and not row.is_convolution
        weight, term = input_of(before, 1), input_of(before, 2)
        product = matrix and _is_weight(weight) and rank(weight) == 2
        product = product and (term is None or _is_vector(term))
        vectors = all(_is_vector(v) for v in before.inputs[1:] if v is not None)
        elementwise = row.family == "unary" or (row.family == "binary" and vectors)
        turned = before.attributes.get_int("transA", 0)
        if turned or not (product or elementwise):
            return
        before = private_maker(before.inputs[0], before)


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and (value.is_initializer() or constant_of(value) is not None)


def _is_vector(value: ir.Value) -> bool:
    """Whether a value is a constant that is the same in all rows of a matrix."""
    shape = static_shape(value)
    return _is_weight(value) and shape is not None and len(shape) < 3 and shape[:-1] in ((), (1,))


def _same_width(before: ir.Value, rows: ir.Value) -> bool:
    """Whether a ``Reshape`` to a matrix puts all but two axes into its rows."""
    width = prod(d for d in (before.shape or ())[2:] if isinstance(d, int))
    return rows.shape is not None and rows.shape[1] == width


def _perm(node: ir.Node) -> Sequence[int]:
    return list(node.attributes.get_ints("perm", ())) if is_op(node, "Transpose") else []
