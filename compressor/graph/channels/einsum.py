"""Channels through ``Einsum``: a product in the space of all its letters, then sums."""

from __future__ import annotations

import string

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.flow import UNKNOWN, Flow, Meeting
from compressor.graph.channels.labels import Family, depends_on
from compressor.graph.layers import weight_source


def einsum(flow: Flow, node: ir.Node) -> None:
    """``Einsum``, each letter once in a term."""
    inputs = [v for v in node.inputs if v is not None]
    shapes = [flow.shape(v) or () for v in inputs]
    parsed = terms(node.attributes.get_string("equation", ""), [len(s) for s in shapes])
    if any(flow.shape(v) is None for v in inputs):
        flow.freeze_node(node, UNKNOWN)
        return
    if parsed is None:
        flow.freeze_node(node, "has an equation that is not understood")
        return
    given, result = parsed
    letters = [*result, *sorted(set("".join(given)) - set(result))]
    meetings = [
        Meeting(
            value.name or "",
            tuple(_length(shape, term, letter) for letter in letters),
            [_spread(family, term, letters) for family in flow.labels(value)],
        )
        for value, shape, term in zip(inputs, shapes, given, strict=True)
    ]
    found = flow.meet(node, meetings)
    summed = list(range(len(result), len(letters)))
    flow.sum_over(found, summed)
    left = []
    for family in found:
        rest = family
        for axis in summed:
            rest = rest.take([0], axis)
        if rest.size > 1:
            left.append(rest.reshape(rest.shape[: len(result)]))
    flow.put(node.outputs[0], left)
    _note_layers(flow, node, given, result)


def terms(equation: str, ranks: list[int]) -> tuple[list[str], str] | None:
    """Return the letters of each input and of the output, ellipses written out.

    Args:
        equation: as ONNX has it.
        ranks: of the inputs.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    named = given.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    lengths = [
        rank - len(t.replace("...", ""))
        for t, rank in zip(named, ranks, strict=False)
        if "..." in t
    ]
    most = max(lengths, default=0)
    if len(named) != len(ranks) or most > len(free) or min(lengths, default=0) < 0:
        return None
    if not arrow:
        line = "".join(named).replace(".", "")
        once = "".join(sorted(c for c in set(line) if line.count(c) == 1))
        result = ("..." if lengths else "") + once
    whole = []
    for term, rank in zip(named, ranks, strict=True):
        count = rank - len(term.replace("...", ""))
        whole.append(term.replace("...", "".join(free[most - count : most])))
    result = result.replace("...", "".join(free[:most]))
    fits = all(len(t) == len(set(t)) == r for t, r in zip(whole, ranks, strict=True))
    return (whole, result) if fits and len(set(result)) == len(result) else None


def _length(shape: tuple[int, ...], term: str, letter: str) -> int:
    return shape[term.index(letter)] if letter in term else 1


def _spread(family: Family, term: str, letters: list[str]) -> Family:
    """Give a family an axis for each letter."""
    order = [term.index(letter) for letter in letters if letter in term]
    own = np.transpose(family, order)
    return own.reshape([_length(family.shape, term, letter) for letter in letters])


def _note_layers(flow: Flow, node: ir.Node, given: list[str], result: str) -> None:
    """Say which letters a weight alone brings in: those are what a layer computes."""
    output = node.outputs[0]
    if flow.is_constant(output):
        return
    for index, (value, term) in enumerate(zip(node.inputs, given, strict=True)):
        others = "".join(t for i, t in enumerate(given) if i != index)
        if value is None or not flow.is_constant(value) or all(c in result for c in term):
            continue
        origin, _ = weight_source(value)
        for axis, letter in enumerate(term):
            written = letter in result and letter not in others
            flow.role(value, axis, "output" if written else "input")
            family = flow.on_axis(output, result.index(letter)) if written else None
            if family is not None and depends_on(family, result.index(letter)):
                flow.source(node, origin, family)
                flow.observe(output, result.index(letter))
