"""Which values are zero where a unit's parameters are, and where a removal is not the same as that.

A unit whose parameters are zero, all but those of the spared roles, computes zero until an operator
such as ``Sigmoid`` makes something else of it. That does not matter where weights of zero read it;
it does where values are added up, or divided by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.flow import Flow
from compressor.graph.channels.products import terms
from compressor.graph.operators import operator, operator_named
from compressor.graph.values import input_of, is_op
from compressor.types.channels import SPARED, Units

Axes = Mapping[str, tuple[Units | None, ...]]
Place = tuple[str, int]


class Zeros:
    """Follow zeros through a graph.

    Args:
        flow: what the rules recorded, in the order of nodes.
        axes: units along the axes of each value.

    Attributes:
        places: axes of values that are zero wherever the parameters of their units are zero, all
            but those of the spared roles.
        sums: units that a node sums over or divides by, so that removing them is not the same as
            setting their parameters to zero.
    """

    def __init__(self, flow: Flow, axes: Axes):
        self._flow = flow
        self._axes = axes
        self.places: set[Place] = set()
        self.sums: list[tuple[ir.Node, Units]] = []
        for name, value in flow.model.graph.initializers.items():
            if value.dtype is not None and value.dtype.is_floating_point():
                self.places.update(
                    (name, axis)
                    for axis in range(len(axes.get(name, ())))
                    if flow.roles.get((name, axis), "other") not in SPARED
                )
        for node in flow.model.graph:
            self._compare(node)
            for output in node.outputs:
                name = output.name or ""
                for axis, units in enumerate(axes.get(name, ())):
                    if units is not None and self._stays(node, axis, units):
                        self.places.add((name, axis))

    def _lines(self, value: ir.Value | None) -> tuple[Units | None, ...]:
        return self._axes.get((value.name or "") if value is not None else "", ())

    def _units(self, value: ir.Value | None, axis: int) -> Units | None:
        lines = self._lines(value)
        return lines[axis] if -len(lines) <= axis < len(lines) else None

    def _zero(self, value: ir.Value | None, axis: int) -> bool:
        lines = self._lines(value)
        return value is not None and (value.name or "", axis % max(len(lines), 1)) in self.places

    def _holds(self, value: ir.Value | None, axis: int, units: Units, rank: int) -> bool:
        """Return whether a value is zero for the same units, after it is broadcast to a rank."""
        own_rank = len(self._flow.shape(value) or ())
        value_units = self._units(value, axis - rank) if axis - rank >= -own_rank else None
        same = value_units is not None and np.array_equal(
            value_units[units >= 0], units[units >= 0]
        )
        return same and self._zero(value, axis - rank)

    def _among(self, value: ir.Value | None, sought: Units) -> bool:
        """Return whether a value is zero for units, along whatever axis."""
        lines = self._lines(value)
        numbers = sought[sought >= 0]
        return any(
            units is not None and self._zero(value, axis) and bool(np.isin(numbers, units).all())
            for axis, units in enumerate(lines)
        )

    def _stays(self, node: ir.Node, axis: int, units: Units) -> bool:
        """Return whether an output is zero along an axis, as the node's inputs are."""
        rank = len(self._flow.shape(node.outputs[0]) or ())
        inputs = [v for v in node.inputs if v is not None]
        if not inputs:
            return False
        match operator_named(node.op_type).zeros:
            case "lost":
                return False
            case "all":
                return all(self._holds(v, axis, units, rank) for v in inputs)
            case "any":
                return any(self._holds(v, axis, units, rank) for v in inputs)
            case "first":
                return self._holds(inputs[0], axis, units, rank)
            case "branches":
                return all(self._holds(v, axis, units, rank) for v in inputs[1:])
            case "parts":
                return all(self._part(v, units) for v in inputs)
            case "bounds":
                return self._among(inputs[0], units) and self._numbers(node)
            case "repeated":
                return self._among(inputs[0], units) or self._blank(node)
            case "biased":
                bias = input_of(node, 2)
                factors = any(self._among(v, units) for v in node.inputs[:2])
                return factors and (bias is None or self._among(bias, units))
            case "factors":
                return any(self._among(v, units) for v in inputs)
            case "affine":
                return all(self._among(v, units) for v in inputs[1:3]) and len(inputs) > 1
        return self._among(inputs[0], units)

    def _part(self, value: ir.Value, units: Units) -> bool:
        """Return whether one part of several is zero wherever it has units of the whole."""
        lines = self._lines(value)
        return all(
            line is None or not np.isin(line[line >= 0], units).any() or self._zero(value, axis)
            for axis, line in enumerate(lines)
        )

    def _numbers(self, node: ir.Node) -> bool:
        """Return whether zero stays zero between the bounds of a ``Clip``, or beside a ``Pad``."""
        bounds = [None if v is None else self._flow.lengths.constant(v) for v in node.inputs[1:]]
        if operator(node).moves == "padded":
            filled = bounds[1] if len(bounds) > 1 else None
            absent = input_of(node, 2) is None
            return absent or (filled is not None and not filled.any())
        low, high = [*bounds, None, None][:2]
        all_constant = all(
            g is not None or v is None for g, v in zip(bounds, node.inputs[1:], strict=True)
        )
        return all_constant and not any(
            bool((sign * bound > 0).any())
            for sign, bound in ((1, low), (-1, high))
            if bound is not None
        )

    def _blank(self, node: ir.Node) -> bool:
        if len(node.inputs) > 1:  # what Expand repeats; ConstantOfShape has an attribute
            constant = self._flow.lengths.constant(node.inputs[0])
            return constant is not None and not constant.any()
        value = node.attributes.get("value")
        return value is None or not value.as_tensor().numpy().any()

    def _compare(self, node: ir.Node) -> None:
        """Note what a node adds up, or divides by, where that differs from a removal."""
        units: list[Units] = []
        row = operator_named(node.op_type)
        if row.adds:
            units = list(self._gone(node.inputs[0], node.outputs[0]))
        elif row.undefined_at_zero is not None:
            places = self._zeros_of(node.inputs[row.undefined_at_zero])
            units = list(places) if self._undefined(node) else []
        elif operator(node).family == "product":
            units = list(self._factors(node))
        lines = [line[line >= 0] for line in units]
        if any(len(line) for line in lines):
            self.sums.append((node, np.unique(np.concatenate(lines))))

    def _undefined(self, node: ir.Node) -> bool:
        if not is_op(node, "Pow"):
            return True
        power = self._flow.lengths.constant(node.inputs[1])
        return power is None or bool((power <= 0).any())

    def _zeros_of(self, value: ir.Value | None) -> Iterable[Units]:
        lines = self._lines(value)
        for axis, units in enumerate(lines):
            if units is not None and self._zero(value, axis):
                yield units

    def _gone(self, source: ir.Value | None, output: ir.Value) -> Iterable[Units]:
        """Yield units that are added up in a reduction though they are not zero."""
        left = [u for u in self._axes.get(output.name or "", ()) if u is not None]
        remaining = np.concatenate(left) if left else np.empty(0, dtype=np.int64)
        lines = self._lines(source)
        for axis, units in enumerate(lines):
            if units is not None and not self._zero(source, axis):
                yield units[~np.isin(units, remaining)]

    def _factors(self, node: ir.Node) -> Iterable[Units]:
        """Yield units that are summed over though neither factor is zero."""
        if is_op(node, "Einsum"):
            yield from self._letters(node)
            return
        first, second = node.inputs[0], node.inputs[1]
        places: list[tuple[ir.Value | None, int]]
        row = operator(node)
        if not row.is_convolution:  # MatMul has no such attributes
            left, right = (node.attributes.get_int(name, 0) for name in ("transA", "transB"))
            places = [(first, -2 if left else -1), (second, -1 if right else -2)]
        else:
            if node.attributes.get_int("group", 1) > 1:
                return  # what a group reads goes with what it writes
            places = [(first, 1), (second, 0 if row.transposed_weight else 1)]
        if not any(self._zero(value, axis) for value, axis in places):
            for value, axis in places:
                units = self._units(value, axis)
                if units is not None:
                    yield units

    def _letters(self, node: ir.Node) -> Iterable[Units]:
        inputs = [v for v in node.inputs if v is not None]
        ranks = [len(self._flow.shape(v) or ()) for v in inputs]
        parsed = terms(node.attributes.get_string("equation", ""), ranks)
        terms_in, result = parsed or ([], "")
        for letter in sorted(set("".join(terms_in)) - set(result)):
            places = [
                (v, t.index(letter)) for v, t in zip(inputs, terms_in, strict=True) if letter in t
            ]
            if not any(self._zero(value, axis) for value, axis in places):
                lines = (self._units(value, axis) for value, axis in places)
                yield from (units for units in lines if units is not None)
