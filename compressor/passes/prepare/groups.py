"""Find on a graph whose channels can be scaled without a change of its function.

The values between layers fall into groups: what an operator ties together, such as the two sides of
an activation that commutes with positive factors, or all sums of a residual stream. A group's
channels may be divided by factors where every layer, norm and constant that writes them can take
the factors over, and every layer that reads them can multiply by them.

Which channels are the same is the channel analysis' knowledge; here values are tied by operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from compressor.graph.channels.analysis import analyse
from compressor.graph.editing import inner_nodes
from compressor.graph.layers import layer_of, layers_with_nodes
from compressor.graph.operators import operator, operator_named
from compressor.graph.stored_weights import sole_path
from compressor.graph.values import constant_array, constant_of, input_of, sole_reader
from compressor.passes.prepare.scales import (
    ChannelVector,
    Read,
    ScaleGroup,
    ScaleMap,
    Step,
    Written,
)
from compressor.types.channels import Units
from compressor.types.layers import Layer

_WHOLE = ("same", "shape", "order", "some")
_NORMS = ("channel-norm", "layer-norm")


def scale_map(model: ir.Model, parameters: Collection[str]) -> ScaleMap:
    """Find the groups of channels that can be scaled by changing ``parameters`` only.

    Args:
        model: a graph with inferred shapes, sorted; not changed.
        parameters: names of those that may be changed.
    """
    walk = _Walk(model, parameters)
    for node in model.graph:
        walk.visit(node)
    walk.block(model.graph.outputs, "an output of the model keeps its scale")
    return walk.result()


class _Walk:
    """Ties values node by node."""

    def __init__(self, model: ir.Model, parameters: Collection[str]):
        axes = analyse(model).axes
        self._lines: dict[str, tuple[int, Units]] = {}
        for name, units in axes.items():
            along = [axis for axis, line in enumerate(units) if line is not None]
            if len(along) == 1 and (line := units[along[0]]) is not None:
                self._lines[name] = along[0], line
        self._graph = model.graph
        self._parameters = parameters
        self._uses = Counter(layer.weight for layer, _ in layers_with_nodes(model))
        self._above: dict[str, str] = {}
        self._blocked: list[tuple[str, str]] = []
        self._reads: list[tuple[str, Layer]] = []
        self._writes: list[tuple[str, Layer]] = []
        self._vectors: list[tuple[str, str]] = []
        self._steps: list[Step] = []
        self._ties: list[tuple[str, str]] = []  # an operator's output, and its type
        self.block((v for v in model.graph.inputs), "an input of the model keeps its scale")

    # ------------------------------------------------------------------ nodes

    def visit(self, node: ir.Node) -> None:
        """Tie what a node reads and writes, or note that it keeps their scale."""
        inner = inner_nodes(node)
        if inner:
            read = [v for n in inner for v in n.inputs if v is not None and v.graph is self._graph]
            self.block([*read, *node.inputs, *node.outputs], "a branch or body reads it")
            return
        row = operator(node)
        if row.is_product:
            self._layer(node)
        elif operator_named(node.op_type).family in _NORMS:
            self._norm(node)
        elif row.family == "concat" or (row.family == "binary" and row.zeros == "all"):
            self._join(node)
        elif row.arithmetic in ("*", "/"):
            self._product(node)
        elif self._commutes(node):
            self.block(node.inputs[1:], f"{node.op_type} reads it beside what it scales")
            self._tie(node, node.inputs[:1])
        else:
            inputs = [v for v in node.inputs if v is not None and not v.is_initializer()]
            self.block([*inputs, *node.outputs], f"{node.op_type} does not commute with factors")
            if row.family == "unary" and inputs:
                self._pass(node, inputs[:1])

    def _commutes(self, node: ir.Node) -> bool:
        row = operator(node)
        if row.moves == "padded":
            fill = input_of(node, 2)
            mode = node.attributes.get_string("mode", "constant")
            filled = None if fill is None else constant_array(fill)
            zero = fill is None or (filled is not None and not filled.any())
            return mode != "constant" or zero
        if node.attributes.get_float("extrapolation_value", 0.0):
            return False  # what a Resize puts outside of the image has a scale of its own
        dtype = node.outputs[0].dtype
        cast = row.moves == "type" and dtype is not None and dtype.is_floating_point()
        return row.moves in _WHOLE or row.passes_factor or row.family == "spatial" or cast

    def _layer(self, node: ir.Node) -> None:
        layer, entry, output = layer_of(node), node.inputs[0], node.outputs[0]
        owned = layer is not None and self._owned(layer, node)
        if layer is None or entry is None or not owned:
            kept = (
                "a product of two values"
                if layer is None
                else "a weight is shared or stays as it is"
            )
            computed = [v for v in node.inputs if v is not None and not v.is_initializer()]
            self.block([*computed, output], kept)
            return
        axis = 1 if layer.is_convolution else -1
        if self._fits(entry, axis, _channels_read(layer)):
            self._reads.append((self._name(entry), layer))
            self._steps.append(Step(self._name(output), (self._name(entry),), layer))
        else:
            self.block([entry], "its channels are not followed")
        bias = input_of(node, 2)
        owned = bias is None or self._is_vector(bias, layer.rows)
        if owned and self._fits(output, axis, layer.rows):
            self._writes.append((self._name(output), layer))
            if bias is not None:
                self._vectors.append((self._name(output), self._name(bias)))
        else:
            self.block([output], "its channels are not followed" if owned else "a shared bias")

    def _norm(self, node: ir.Node) -> None:
        self.block(node.inputs[:1], f"{node.op_type} does not commute with factors")
        output = node.outputs[0]
        axis = 1 if operator_named(node.op_type).family == "channel-norm" else -1
        vectors = [v for v in node.inputs[1:3] if v is not None]
        line = self._lines.get(self._name(output))
        length = -1 if line is None else len(line[1])
        last = node.attributes.get_int("axis", -1) in (-1, len(output.shape or ()) - 1)
        whole = axis == 1 or last
        owned = bool(vectors) and all(self._is_vector(v, length) for v in vectors)
        others = any(o.uses() or o.is_graph_output() for o in node.outputs[1:])
        if whole and owned and not others and self._fits(output, axis, length):
            self._vectors += [(self._name(output), self._name(v)) for v in vectors]
        else:
            self.block(node.outputs, "a norm without parameters of its own")

    def _join(self, node: ir.Node) -> None:
        """Tie values that meet: they need the same factors, and constants take them over."""
        values = [v for v in node.inputs if v is not None]
        computed = [v for v in values if constant_of(v) is None]
        self._tie(node, computed)
        line = self._lines.get(self._name(node.outputs[0]))
        for value in values:
            if constant_of(value) is None:
                continue
            theirs = self._lines.get(self._name(value))
            fits = line is not None and theirs is not None and np.array_equal(line[1], theirs[1])
            adds = operator(node).family == "binary"
            if adds and fits and line is not None and self._is_vector(value, len(line[1])):
                self._vectors.append((self._name(node.outputs[0]), self._name(value)))
            else:
                self.block(node.outputs, "a constant that is not its own meets it")

    def _product(self, node: ir.Node) -> None:
        """Tie one factor of a product to the product, which has its size."""
        output = node.outputs[0]
        factors = [v for v in node.inputs if v is not None and constant_of(v) is None]
        if operator(node).arithmetic == "/":
            factors = [v for v in factors if v is node.inputs[0]]
        whole = [v for v in factors if _same_shape(v, output)]
        chosen = next((v for v in whole if not self._is_gate(v)), None)
        others = [v for v in node.inputs if v is not None and v is not chosen]
        self.block([v for v in others if constant_of(v) is None], "it gates another value")
        if chosen is None or factors.count(chosen) > 1:
            self.block([*factors, output], "a product of two values")
        else:
            self._tie(node, [chosen])

    @staticmethod
    def _is_gate(value: ir.Value) -> bool:
        """Whether a value is bounded, as what multiplies others is."""
        row = operator(value.producer())
        return row.activation and not row.passes_factor

    # ------------------------------------------------------------------ what is recorded

    def block(self, values: Iterable[ir.Value | None], reason: str) -> None:
        """Note that values keep their scale."""
        self._blocked += [(self._name(v), reason) for v in values if v is not None and v.name]

    def _tie(self, node: ir.Node, inputs: Iterable[ir.Value | None]) -> None:
        names = [self._name(v) for v in inputs if v is not None]
        for output in node.outputs:
            if not output.name:
                continue
            self._ties.append((output.name, node.op_type))
            line = self._lines.get(output.name)
            if line is None:
                self.block([*node.inputs[:1], output], "its channels are not followed")
            for name in names:
                self._above[self._root(name)] = self._root(output.name)
                theirs = self._lines.get(name)
                if line is not None and theirs is not None:
                    kept = np.isin(theirs[1], line[1]) | (theirs[1] < 0)
                    if not kept.all() and operator(node).moves != "some" and len(node.outputs) < 2:
                        self._blocked.append((name, f"{node.op_type} mixes its channels"))
        self._pass(node, [v for v in inputs if v is not None])

    def _pass(self, node: ir.Node, inputs: Iterable[ir.Value]) -> None:
        names = tuple(self._name(v) for v in inputs if self._name(v) in self._lines)
        for output in node.outputs:
            if self._name(output) in self._lines:
                self._steps.append(Step(self._name(output), names))

    @staticmethod
    def _name(value: ir.Value) -> str:
        return value.name or ""

    def _root(self, name: str) -> str:
        while (above := self._above.get(name, name)) != name:
            self._above[name] = self._above.get(above, above)
            name = above
        return name

    def _fits(self, value: ir.Value, axis: int, length: int) -> bool:
        """Whether a value has channels along an axis, as many as wanted, and along no other."""
        line = self._lines.get(self._name(value))
        rank = len(value.shape) if value.shape is not None else 0
        return line is not None and rank > 1 and line[0] == axis % rank and len(line[1]) == length

    def _owned(self, layer: Layer, node: ir.Node) -> bool:
        """Whether a layer's weight can be changed, and nothing else reads it."""
        once = sole_path(node) is not None
        plain = node.attributes.get_int("transA", 0) == 0
        return once and plain and self._uses[layer.weight] == 1 and self._may(layer.weight)

    def _is_vector(self, value: ir.Value, length: int) -> bool:
        """Whether a value is a parameter with one element a channel that nothing else reads."""
        line, name = self._lines.get(self._name(value)), self._name(value)
        shape = [] if value.shape is None else [d for d in value.shape if d != 1]
        once = value.is_initializer() and sole_reader(value) is not None
        return once and line is not None and shape == [length] and self._may(name)

    def _may(self, name: str) -> bool:
        value = self._graph.initializers.get(name)
        floats = value is not None and value.dtype is not None and value.dtype.is_floating_point()
        return floats and name in self._parameters

    # ------------------------------------------------------------------ groups

    def result(self) -> ScaleMap:
        """Return the groups that have something left to scale, and readers that make up for it."""
        members: dict[str, list[str]] = {}
        for name in [n for n in self._order() if n in self._lines]:
            members.setdefault(self._root(name), []).append(name)
        kept: dict[str, set[int]] = {}
        whole: set[str] = set()
        for name, _ in self._blocked:
            line = self._lines.get(name)
            if line is None:
                whole.add(self._root(name))
            else:
                kept.setdefault(self._root(name), set()).update(line[1].tolist())
        groups = []
        for root, names in members.items():
            if root not in whole:
                groups.append(self._group(root, names, kept.get(root, set())))
        usable = tuple(g for g in groups if g is not None)
        reasons = Counter(reason for _, reason in self._blocked).most_common(1)
        reason = reasons[0][0] if reasons else ""
        return ScaleMap(usable, tuple(self._steps), self._lines, reason, self._reasons())

    def _reasons(self) -> dict[str, str]:
        """Return why values keep their scale, by their own or their group's first reason."""
        by_root: dict[str, str] = {}
        for name, reason in self._blocked:
            by_root.setdefault(self._root(name), reason)
        names = {*self._lines, *(name for name, _ in self._blocked)}
        alone = dict(reversed(self._blocked))
        by_group = {n: by_root[self._root(n)] for n in names if self._root(n) in by_root}
        return {**by_group, **alone}

    def _order(self) -> list[str]:
        return [v.name for node in self._graph for v in node.outputs if v.name]

    def _group(self, root: str, names: list[str], kept: set[int]) -> ScaleGroup | None:
        units = np.unique(np.concatenate([self._lines[name][1] for name in names]))
        free = units[(units >= 0) & ~np.isin(units, list(kept))]
        if len(free) < 2:
            return None
        number = np.full(int(units.max()) + 2, -1, dtype=np.int64)  # the last one is that of -1
        number[free] = np.arange(len(free))
        lines = {name: (self._lines[name][0], number[self._lines[name][1]]) for name in names}
        reads = tuple(
            Read(layer, value, _of_columns(layer, lines[value][1]))
            for value, layer in self._reads
            if self._root(value) == root
        )
        writes = tuple(
            Written(layer, value, lines[value][1])
            for value, layer in self._writes
            if self._root(value) == root
        )
        vectors = tuple(
            ChannelVector(name, lines[value][1])
            for value, name in self._vectors
            if self._root(value) == root
        )
        # Values whose channels come first have no axis of samples, which statistics go by.
        if not reads or not (writes or vectors) or any(not axis for axis, _ in lines.values()):
            return None
        name = writes[0].layer.name if writes else vectors[0].name
        tied = dict.fromkeys(kind for value, kind in self._ties if self._root(value) == root)
        return ScaleGroup(name, len(free), reads, writes, vectors, lines, through=tuple(tied))


def _channels_read(layer: Layer) -> int:
    kernel = int(np.prod(layer.shape[2:])) if layer.is_convolution else 1
    return layer.columns // kernel * (layer.groups if layer.is_convolution else 1)


def _of_columns(layer: Layer, line: Units) -> Units:
    """Return for each weight in a row of each channel group what holds for its channel."""
    groups = layer.groups if layer.is_convolution else 1
    each = line.reshape(groups, -1)
    return np.repeat(each, layer.columns // each.shape[1], axis=1)


def _same_shape(value: ir.Value, other: ir.Value) -> bool:
    return value.shape is not None and other.shape is not None and value.shape == other.shape
