"""Find what in a graph determines the scale of a layer's input channels.

AWQ multiplies a layer's columns with factors and divides the layer's input by them. The division
costs nothing where something before the layer can absorb it: the weight of a norm, or the rows of
another layer, with nothing in between but operators that commute with positive factors.
J. Lin et al., AWQ, 2023 (arXiv:2306.00978), section 3.2.

Channels are followed by example: an array of the value's shape that holds, at each place, the
number of the channel that the place's value is a multiple of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import onnx_ir as ir

from compressor.graph.layers import layer_of, layers_with_nodes, moment_request
from compressor.graph.operators import operator, operator_named
from compressor.graph.values import constant_array, input_of, is_op, sole_reader, static_shape
from compressor.models.layer_uses import nodes_of
from compressor.types.layers import Layer
from compressor.types.statistics import Request
from compressor.types.tensors import Array

_SIZES = (2, 3, 5, 7, 11, 13)  # of dynamic axes, in the order in which they are met
_FEW = 1
_ROWS_PER_COLUMN = 32  # input vectors for each of their elements, from which moments are found


@dataclass(frozen=True)
class Source:
    """What can absorb a factor for each column of the layers that read a value."""

    channels: tuple[int, ...]  # for each column, the channel of the source that it is a multiple of
    count: int  # how many channels the source has
    vectors: tuple[str, ...] = ()  # names of parameters with one element a channel, to be divided
    layer: Layer | None = None  # the layer whose rows are the channels, to be divided too
    through: tuple[str, ...] = ()  # operators between it and what reads the value
    # What is scaled on the way, with the axis of its channels and the channel of each element
    # there; `None` where channels lie along several axes, as in parts of heads.
    between: Mapping[str, tuple[int, Array] | None] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class InputGroup:
    """The layers that read one value."""

    request: Request  # for the second moment of the value
    layers: tuple[Layer, ...]  # those that are quantized, in the order of execution
    source: Source | None = None  # what absorbs factors; `None` if nothing does
    reason: str = ""  # why nothing does
    shared: bool = False  # whether something else reads a weight, so that its columns must stay


def input_groups(
    model: ir.Model, chosen: Collection[str], parameters: Collection[str]
) -> tuple[InputGroup, ...]:
    """Group the ``chosen`` layers by what they read, in the order of execution, with their sources.

    Shapes must be inferred; only ``parameters`` can absorb factors.
    """
    uses = _weight_uses(model)
    grouped: dict[str, list[tuple[Layer, ir.Node]]] = {}
    requests: dict[str, Request] = {}
    for layer, node in nodes_of(model).values():
        request = moment_request(layer, node, _ROWS_PER_COLUMN)
        if request is not None and layer.name in chosen:
            requests[request.key] = request
            grouped.setdefault(request.key, []).append((layer, node))
    groups = []
    for key, members in grouped.items():
        value = members[0][1].inputs[0]
        assert value is not None
        layers = tuple(layer for layer, _ in members)
        group = InputGroup(requests[key], layers)
        reason = _unmovable(value, members, uses)
        source = None if reason else _Tracer(uses).source(value, layers[0])
        if source is not None and not set(touched(source)) <= set(parameters):
            source = None
        if source is None and not reason:
            reason = "nothing before it absorbs factors"
        shared = any(uses[layer.weight] > 1 for layer in layers)
        groups.append(replace(group, source=source, reason=reason, shared=shared))
    return tuple(groups)


def touched(source: Source) -> list[str]:
    """Return the names of the parameters that absorb the factors."""
    return [*source.vectors, *([] if source.layer is None else [source.layer.weight])]


def _weight_uses(model: ir.Model) -> Mapping[str, int]:
    """Count what reads each weight: layers, and whether anything else does."""
    counted: dict[str, int] = {}
    others: set[str] = set()
    for layer, node in layers_with_nodes(model):
        counted[layer.weight] = counted.get(layer.weight, 0) + 1
        value = model.graph.initializers.get(layer.weight)
        if value is not None and not _leads_only_to(node, value):
            others.add(layer.weight)
    return {name: count + (name in others) for name, count in counted.items()}


def _leads_only_to(node: ir.Node, value: ir.Value) -> bool:
    """Whether one node reads a value, at once or through others of which each has one reader."""
    reader = sole_reader(value)
    while reader is not None and reader is not node:
        reader = sole_reader(reader.outputs[0])
    return reader is node


def _unmovable(
    value: ir.Value, members: list[tuple[Layer, ir.Node]], uses: Mapping[str, int]
) -> str:
    """Return why the input of some layers cannot be scaled; empty if it can."""
    readers = {node for _, node in members}
    others = [use.node for use in value.uses() if use.node not in readers]
    if others or value.is_graph_output():
        layers = (layer_of(node) for node in others)
        kept = next((layer.name for layer in layers if layer is not None), None)
        return f"its input is read by {kept or 'something else'} too"
    if any(uses[layer.weight] > 1 for layer, _ in members):
        return "its weight is read twice"
    if any(layer.groups > 1 for layer, _ in members):
        return "it has channel groups"
    return ""


@dataclass(frozen=True)
class _Traced:
    """A value's channels: the source without its columns, and the labels in the value's shape.

    ``behind`` has the labels of the values that it was made of.
    """

    source: Source
    labels: Array
    behind: Mapping[str, Array] = field(default_factory=dict)


class _Tracer:
    """Follows one value back to what its channels are multiples of."""

    def __init__(self, uses: Mapping[str, int]):
        self._uses = uses
        self._sizes: dict[str, int] = {}
        self._passed: list[str] = []

    def source(self, value: ir.Value, layer: Layer) -> Source | None:
        traced = self._trace(value, first=True)
        if traced is None:
            return None
        labels = traced.labels
        if layer.is_convolution and not layer.is_transposed_convolution:
            labels = np.moveaxis(labels, 1, -1)
        channels = labels.reshape(-1, labels.shape[-1])
        if not (channels == channels[0]).all():
            return None
        kernel = layer.columns // channels.shape[1]
        columns = np.repeat(channels[0], kernel)
        if len(columns) != layer.columns:
            return None
        return replace(
            traced.source,
            channels=tuple(int(c) for c in columns),
            through=tuple(reversed(dict.fromkeys(self._passed))),
            between={name: _line(each) for name, each in traced.behind.items()},
        )

    def _trace(self, value: ir.Value, *, first: bool = False) -> _Traced | None:
        node = value.producer()
        if node is None or not (first or _read_once(value)):
            return None
        shape = self._shape(value)
        if shape is None:
            return None
        start = self._start(node, value, shape)
        if start is None:
            self._passed.append(node.op_type)
        made = start or self._through(node, value, shape)
        if made is None or first:
            return made
        return replace(made, behind={**made.behind, value.name or "": made.labels})

    def _shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return the shape with a small number for each dynamic axis; ``None`` if not known."""
        if value.shape is None:
            return None
        return tuple(self._size(d) for d in value.shape)

    def _size(self, axis: int | ir.SymbolicDim) -> int:
        if isinstance(axis, int):
            return axis
        names = [] if axis.value is None else axis.value.replace(" ", "").split("*")
        if not names or not all(name.isidentifier() for name in names):
            return -1
        size = 1
        for name in names:
            free = _SIZES[len(self._sizes) % len(_SIZES)]
            size *= self._sizes.setdefault(name, free)
        return size

    def _start(self, node: ir.Node, value: ir.Value, shape: tuple[int, ...]) -> _Traced | None:
        if operator_named(node.op_type).family == "layer-norm" and value is node.outputs[0]:
            return _labelled(_norm_source(node, shape), shape, -1)
        if operator(node).arithmetic == "*":
            return _labelled(_vector_source(node, shape), shape, -1)
        layer, bias = self._layer_behind(node)
        if layer is None or self._uses[layer.weight] > 1 or layer.is_transposed_convolution:
            return None
        source = Source((), layer.rows, (bias,) if bias else (), layer)
        made = _labelled(source, shape, 1 if layer.is_convolution else -1)
        if made is None or layer_of(node) is not None:
            return made
        product = next(v for v in node.inputs if v is not None and not v.is_initializer())
        return replace(made, behind={product.name or "": made.labels})

    def _layer_behind(self, node: ir.Node) -> tuple[Layer | None, str | None]:
        """Return the layer that a node is, or adds a bias to, and the bias that it owns."""
        layer = layer_of(node)
        if layer is not None and not layer.is_table:
            bias = input_of(node, 2)
            if bias is None:
                return layer, None
            owned = _vector_length(bias) == layer.rows and _read_once(bias)
            return (layer, bias.name) if owned else (None, None)
        if operator(node).arithmetic != "+":
            return None, None
        for bias, product in (node.inputs, reversed(node.inputs)):
            if bias is None or product is None or not _read_once(bias) or not _read_once(product):
                continue
            inner = product.producer()
            layer = None if inner is None or len(inner.inputs) > 2 else layer_of(inner)
            fits = layer is not None and _vector_length(bias) == layer.rows
            if layer is not None and layer.bias_is_separate and fits:
                return layer, bias.name
        return None, None

    def _through(self, node: ir.Node, value: ir.Value, shape: tuple[int, ...]) -> _Traced | None:
        """Return the labels of a value that a node makes of another with the same factors."""
        if operator(node).arithmetic == "*":
            return self._product(node, shape)
        if operator(node).bias_is_separate:
            return self._mixture(node, shape)
        entry = node.inputs[0] if node.inputs else None
        row = operator(node)
        moves = row.moves in ("same", "type", "shape", "order")
        if entry is None or not (moves or row.passes_factor):
            return None
        if row.moves == "type" and not (
            value.dtype is not None and value.dtype.is_floating_point()
        ):
            return None
        traced = self._trace(entry)
        if traced is None:
            return None
        labels = self._moved(node, value, traced.labels, shape)
        return None if labels is None else replace(traced, labels=labels)

    def _moved(
        self, node: ir.Node, value: ir.Value, labels: Array, shape: tuple[int, ...]
    ) -> Array | None:
        if operator(node).family == "reshape":
            return _reshaped(labels, shape, value)
        if operator(node).moves == "order":
            perm = node.attributes.get_ints("perm", None)
            return labels.transpose(None if perm is None else list(perm))
        if is_op(node, "Expand"):
            return np.broadcast_to(labels, shape) if -1 not in shape else None
        if operator(node).family == "split":
            return self._part(node, value, labels)
        if operator(node).moves == "some" and not _forward(node):
            return None
        return labels if labels.shape == shape else None  # a slice that takes everything

    def _part(self, node: ir.Node, value: ir.Value, labels: Array) -> Array | None:
        axis = node.attributes.get_int("axis", 0)
        shapes = [self._shape(output) for output in node.outputs]
        start = 0
        for output, shape in zip(node.outputs, shapes, strict=True):
            if shape is None or shape[axis] == -1:
                return None
            if output is value:
                return labels.take(range(start, start + shape[axis]), axis)
            start += shape[axis]
        return None

    def _product(self, node: ir.Node, shape: tuple[int, ...]) -> _Traced | None:
        """Follow the factor of a product that has the product's own shape."""
        for factor in node.inputs:
            if factor is not None and not factor.is_initializer() and self._shape(factor) == shape:
                traced = self._trace(factor)
                if traced is not None:
                    return traced
        return None

    def _mixture(self, node: ir.Node, shape: tuple[int, ...]) -> _Traced | None:
        """Follow what attention mixes: sums over positions keep the factors of channels."""
        mixed = node.inputs[1]
        if mixed is None or mixed.is_initializer() or layer_of(node) is not None or -1 in shape:
            return None
        traced = self._trace(mixed)
        if traced is None or traced.labels.ndim < 2:
            return None
        rows = traced.labels[..., :1, :]
        if not (traced.labels == rows).all():
            return None
        labels = _repeated(rows, shape)
        return None if labels is None else replace(traced, labels=labels)


def _forward(node: ir.Node) -> bool:
    """Whether a slice takes elements in their order: its steps are known to be positive."""
    steps = input_of(node, 4)
    numbers = constant_array(steps)
    return steps is None or (numbers is not None and bool((numbers > 0).all()))


def _repeated(labels: Array, shape: tuple[int, ...]) -> Array | None:
    """Repeat labels over a shape, in which one batch may have another number or name.

    Returns:
        ``None`` where labels differ along such an axis.
    """
    labels = labels.reshape((1,) * (len(shape) - labels.ndim) + labels.shape)
    for axis, length in enumerate(shape):
        if labels.shape[axis] not in (1, length):
            first = labels.take([0], axis)
            if not (labels == first).all():
                return None
            labels = first
    return np.broadcast_to(labels, shape)


def _reshaped(labels: Array, shape: tuple[int, ...], value: ir.Value) -> Array | None:
    """Give labels the shape of a value; the number that stands for its dynamic axis may be off."""
    lengths = list(shape)
    dynamic = [i for i, d in enumerate(value.shape or ()) if not isinstance(d, int)]
    if len(dynamic) == 1:
        lengths[dynamic[0]] = -1
    known = max(prod(d for d in lengths if d != -1), 1)
    whole = labels.size == known or (lengths.count(-1) == 1 and labels.size % known == 0)
    return labels.reshape(lengths) if whole else None


def _labelled(source: Source | None, shape: tuple[int, ...], axis: int) -> _Traced | None:
    if source is None or shape[axis] != source.count:
        return None
    form = [1] * len(shape)
    form[axis] = source.count
    # An axis of unknown length says nothing about channels: one place stands for all.
    lengths = [max(d, 1) for d in shape]
    labels = np.broadcast_to(np.arange(source.count).reshape(form), lengths)
    return _Traced(source, labels)


def _line(labels: Array) -> tuple[int, Array] | None:
    """Return the one axis along which labels differ, and the labels along it."""
    axes = [a for a in range(labels.ndim) if (labels != labels.take([0], a)).any()]
    if len(axes) != 1 or not axes[0]:
        return None
    return axes[0], np.moveaxis(labels, axes[0], -1).reshape(-1, labels.shape[axes[0]])[0]


def _norm_source(node: ir.Node, shape: tuple[int, ...]) -> Source | None:
    """Return a norm's scale and bias, if they are its own."""
    if node.attributes.get_int("axis", -1) not in (-1, len(shape) - 1):
        return None
    vectors = [v for v in node.inputs[1:3] if v is not None]
    if not vectors or not all(_vector_length(v) == shape[-1] and _read_once(v) for v in vectors):
        return None
    return Source((), shape[-1], tuple(v.name or "" for v in vectors))


def _vector_source(node: ir.Node, shape: tuple[int, ...]) -> Source | None:
    """Return a vector that channels are multiplied with, as the last step of a norm does."""
    for value in node.inputs:
        length = None if value is None else _vector_length(value)
        if value is not None and length == shape[-1] and length > _FEW and _read_once(value):
            return Source((), length, (value.name or "",))
    return None


def _read_once(value: ir.Value) -> bool:
    return len(list(value.uses())) == 1 and not value.is_graph_output()


def _vector_length(value: ir.Value) -> int | None:
    shape = static_shape(value) if value.is_initializer() else None
    return shape[0] if shape is not None and len(shape) == 1 else None
