"""``Einsum`` of a value and a weight becomes the product of matrices that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import onnx_ir as ir

from compressor.graph.channels.products import terms
from compressor.graph.values import static_shape
from compressor.passes.fuse.draft import AttributeValue, Dim, Draft, put, replace


def einsum_to_matmul(node: ir.Node, draft: Draft) -> bool:
    """Replace ``Einsum`` of a value and a weight by MatMul between views of both.

    Attention that keeps its heads apart is written so, as ``abc,cde->abde`` in Keras and
    ``ibh,hnd->ibnd`` in XLNet. No other pass finds a layer in it.
    """
    equation = node.attributes.get_string("equation", "")  # no other operator has one
    if not equation or len(node.inputs) != 2:
        return False
    ranks = [len(v.shape) for v in node.inputs if v is not None and v.shape is not None]
    parsed = terms(equation, ranks)
    if len(ranks) != 2 or parsed is None:
        return False
    sides = list(zip(node.inputs, parsed[0], strict=True))
    for (value, letters), (weight, held) in (sides, reversed(sides)):
        sizes = None if weight is None else static_shape(weight)
        if value in draft.parameters or weight not in draft.parameters or sizes is None:
            continue
        made = [c for c in parsed[1] if c in held]
        kept = [c for c in parsed[1] if c in letters]
        summed = [c for c in letters if c in held]
        whole = not set(made) & set(kept) and {*letters, *held} == {*made, *kept, *summed}
        if value is None or value.shape is None or not (whole and made and kept and summed):
            return False
        lengths = dict(zip(letters, value.shape, strict=True))
        rows = dict(zip(held, sizes, strict=True))
        if any(lengths[c] != rows[c] for c in summed):
            return False  # Einsum repeats an axis of length 1, and MatMul does not
        _Writer(node, draft, lengths | rows).write(
            (value, letters), (weight, held), (kept, summed, made), parsed[1]
        )
        return True
    return False


Term = tuple[ir.Value | None, str]
"""A value, and a letter for each of its axes."""


class _Writer:
    def __init__(self, node: ir.Node, draft: Draft, lengths: Mapping[str, Dim]):
        self._node, self._draft, self._lengths = node, draft, lengths

    def write(
        self, value: Term, weight: Term, axes: tuple[list[str], list[str], list[str]], result: str
    ) -> None:
        kept, summed, made = axes
        left = self._merged(self._ordered(*value, [*kept, *summed]), kept, summed)
        right = self._ordered(*weight, [*summed, *made])
        if len(summed) + len(made) > 2:
            rows, columns = self._count(summed), self._count(made)
            right = self._add("Reshape", [right, self._shape([rows, columns])], [rows, columns])
        product = self._add("MatMul", [left, right], [*self._dims(kept), self._count(made)])
        if len(made) > 1:
            shape = self._shape([*[0] * len(kept), *(self._count([c]) for c in made)])
            product = self._add("Reshape", [product, shape], self._dims([*kept, *made]))
        product = self._ordered(product, "".join([*kept, *made]), list(result))
        replace(self._node, "Identity", [product])

    def _merged(self, value: ir.Value, kept: list[str], summed: list[str]) -> ir.Value:
        if len(summed) == 1:
            return value
        count = self._count(summed)
        shape = self._shape([*[0] * len(kept), count])
        return self._add("Reshape", [value, shape], [*self._dims(kept), count])

    def _ordered(self, value: ir.Value | None, letters: str, order: list[str]) -> ir.Value:
        assert value is not None
        perm = [letters.index(c) for c in order]
        if perm == sorted(perm):
            return value
        return self._add("Transpose", [value], self._dims(order), {"perm": perm})

    def _add(
        self,
        operator: str,
        inputs: Sequence[ir.Value],
        shape: Sequence[Dim],
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> ir.Value:
        made = put(self._node, operator, inputs, attributes).outputs[0]
        made.shape = ir.Shape(shape)
        return made

    def _shape(self, numbers: Sequence[int]) -> ir.Value:
        name = f"{self._node.outputs[0].name}/shape"
        return self._draft.constant(numbers, ir.DataType.INT64, name)

    def _dims(self, letters: Sequence[str]) -> list[Dim]:
        return [self._lengths[c] for c in letters]

    def _count(self, letters: Sequence[str]) -> int:
        """Return how many elements axes of the weight have together."""
        return prod(int(d) for d in self._dims(letters) if isinstance(d, int))
