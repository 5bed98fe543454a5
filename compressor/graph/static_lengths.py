"""Lengths of axes that ONNX's own inference does not find."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from compressor.graph.channels.lengths import Lengths

_NEAR, _FAR = 1, 50
"""Offsets of the lengths that are tried: about twice the usual ones, and hundreds more."""


def note_static_lengths(model: ir.Model) -> None:
    """Note which axes of values have a fixed length and which have not, in place.

    Inference on symbols gives up where a length is a quotient of others, such as the heads of an
    attention behind ``Reshape`` to ``[batch, length, -1, 8]``, and at operators that it does not
    know. Here numbers take the place of the dynamic lengths, several in turn: an axis that has
    the same length each time is fixed, and one that has not is dynamic, whatever was noted: an
    exporter may leave the length of its example there. Very long inputs may be more than the
    graph takes, and do not count then. That a length is 1 each time proves nothing: a rounded
    quotient of short ones is that, too.

    Args:
        model: of opset 18 or newer; subgraphs are not entered.
    """
    if not any(_open(value) for node in model.graph for value in node.outputs):
        return
    usual, near, far = (Lengths(model, offset) for offset in (0, _NEAR, _FAR))
    for node in model.graph:
        for value in node.outputs:
            first, second, third = (tried.shape(value) for tried in (usual, near, far))
            if first is None or second is None or len(first) != len(second):
                continue
            if third is None or len(third) != len(first):
                third = first
            tries = list(zip(first, second, third, strict=True))
            value.shape = _noted(value.shape, tries)


def _open(value: ir.Value) -> bool:
    return value.shape is None or not value.shape.is_static()


def _noted(known: ir.Shape | None, tries: Sequence[tuple[int, ...]]) -> ir.Shape:
    dims: list[int | ir.SymbolicDim] = []
    old = list(known) if known is not None and len(known) == len(tries) else [None] * len(tries)
    for before, lengths in zip(old, tries, strict=True):
        fixed = len(set(lengths)) == 1
        if fixed:
            found = lengths[0] if lengths[0] > 1 else before
        else:
            found = None if isinstance(before, int) else before
        dims.append(ir.SymbolicDim(None) if found is None else found)
    return ir.Shape(dims)
