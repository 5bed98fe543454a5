"""Where samples may leave a network, and which axis of its values runs over the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from pydantic import Field

from compressor.errors import SpecError, suggestion
from compressor.graph.editing import inner_nodes
from compressor.graph.layers import layers_with_nodes
from compressor.graph.lengths import Lengths
from compressor.graph.operators import operator
from compressor.graph.values import tensor_spec
from compressor.models.torch.lowering import example_inputs
from compressor.types.layers import Layer
from compressor.types.options import Options

Confidence: TypeAlias = Literal["probability", "entropy", "margin"]
Head: TypeAlias = Literal["linear", "norm-linear"]


class Exit(Options):
    """A place where samples may leave the network."""

    after: str = Field(
        description="a layer, or a part of the network with several, such as layer2 for "
        "layer2.0.conv1 and layer2.1.conv2; the exit lies after its last layer and the "
        "normalization, residual sum and activation that directly follow"
    )
    head: Head = Field(
        default="linear",
        description="linear: means over positions or tokens, and a linear layer; norm-linear: with "
        "a layer norm between the two",
    )
    grid: int = Field(
        default=4,
        ge=1,
        description="images are averaged in a grid of this many by this many parts, or the most "
        "below that their height and width divide into; 1 is the mean over all positions",
    )


@dataclass(frozen=True)
class ExitPoint:
    """A value that a head reads."""

    number: int  # of the exit, from 1
    after: str  # the layer or part that the option names
    layer: Layer  # the last layer before it
    value: str  # name of the value, `[batch, ...]` float32, or codes of it
    channels: int  # length of the axis that the head does not average over
    averaged: tuple[int, ...]  # the other axes but the batch's
    grid: int  # if there are two such axes, the number of parts that each is averaged in
    kernel: tuple[int, ...]  # lengths of these parts; empty if there is one
    head: Head  # what kind

    @property
    def features(self) -> int:
        """How many numbers of a sample the head's linear layer reads."""
        return self.channels * self.grid**2


@dataclass(frozen=True)
class Answer:
    """A classifier's logits: the name of their value, ``[batch, classes]``.

    The activation, if any, is the softmax that turns them into the model's output.
    """

    logits: str
    classes: int
    activation: ir.Node | None


def find_answer(model: ir.Model, batches: Batches) -> Answer:
    """Find the logits of a classifier.

    Raises:
        SpecError: the model is not a classifier: it has several outputs, or one that is not
            ``[batch, classes]`` of float32.
    """
    outputs = model.graph.outputs
    output = outputs[0]
    shape = batches.shape(output)
    if len(outputs) != 1 or shape is None or len(shape) != 2 or batches.axis(output) != 0:
        shown = ", ".join(f"{v.name} {v.shape}" for v in outputs)
        raise SpecError(
            "early exits",
            f"need a classifier with one output [batch, classes], but the model returns {shown}",
            "use it for such a model",
        )
    if output.dtype != ir.DataType.FLOAT or shape[1] < 2:
        raise SpecError(
            f"output {output.name!r}",
            f"is {output.dtype} with {shape[1]} classes, but exits need float32 and two or more",
            "put early-exit before cast",
        )
    node = output.producer()
    last = node is not None and node.attributes.get_int("axis", -1) in (-1, 1)
    if node is not None and last and operator(node).probabilities and node.inputs[0]:
        return Answer(node.inputs[0].name or "", shape[1], node)
    return Answer(output.name or "", shape[1], None)


def find_points(
    model: ir.Model, exits: Sequence[Exit], batches: Batches, answer: Answer
) -> tuple[ExitPoint, ...]:
    """Find the values that exits read.

    Raises:
        SpecError: an exit names no layer, lies at the end, is not after the one before it, or
            reads a value that a head cannot use.
    """
    points = tuple(
        _point(model, number, option, batches) for number, option in enumerate(exits, start=1)
    )
    values = {v.name: v for node in model.graph for v in node.outputs}
    logits = ancestors(values[answer.logits])
    for index, point in enumerate(points):
        value = values[point.value]
        if value.producer() not in logits or point.value == answer.logits:
            raise _misplaced(point, "after which nothing is left to skip", "name an earlier layer")
        if not index:
            continue
        before = points[index - 1]
        if before.value == point.value:
            problem = f"the same place as {before.after!r}"
            raise _misplaced(point, problem, "name each place once")
        if values[before.value].producer() not in ancestors(value):
            problem = f"which is not computed from {before.after!r}"
            raise _misplaced(point, problem, "list exits in the order of execution")
    return points


def _misplaced(place: ExitPoint | tuple[int, str], problem: str, remedy: str) -> SpecError:
    """Return the error for an exit, given by its point or by its number and what it follows."""
    number, after = (place.number, place.after) if isinstance(place, ExitPoint) else place
    return SpecError(f"exits.{number - 1}.after", f"is {after!r}, {problem}", remedy)


def ancestors(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that a value depends on."""
    nodes: set[ir.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending.extend(reads(node))
    return nodes


def _point(model: ir.Model, number: int, option: Exit, batches: Batches) -> ExitPoint:
    place = (number, option.after)
    layers = [entry for entry in layers_with_nodes(model) if entry[1].graph is model.graph]
    inside = [entry for entry in layers if f"{entry[0].name}.".startswith(f"{option.after}.")]
    if not inside:
        names = [layer.name for layer, _ in layers]
        parts = {".".join(n.split(".")[:k]) for n in names for k in range(1, n.count(".") + 1)}
        close = suggestion(option.after, [*names, *sorted(parts)])
        raise _misplaced(place, "which is not a layer", close)
    layer, node = inside[-1]
    value = _settled(model, node)
    shape = batches.shape(value)
    if shape is None or len(shape) < 2 or batches.axis(value) != 0:
        problem = f"whose output {value.name!r} is not [batch, channels, ...]"
        raise _misplaced(place, problem, "name another layer")
    producer = value.producer()
    codes = producer is not None and operator(producer).quantizes
    if value.dtype != ir.DataType.FLOAT and not codes:
        problem = f"whose output is {value.dtype}; heads read float32"
        raise _misplaced(place, problem, "put early-exit before cast")
    channels = 1 if layer.is_convolution else len(shape) - 1
    averaged = tuple(i for i in range(1, len(shape)) if i != channels)
    grid = _grid(value, averaged, option.grid)
    kernel = tuple(shape[i] // grid for i in averaged) if grid > 1 else ()
    name = value.name or ""
    return ExitPoint(
        number, option.after, layer, name, shape[channels], averaged, grid, kernel, option.head
    )


def _grid(value: ir.Value, axes: Sequence[int], most: int) -> int:
    """Return the number of parts that height and width are averaged in; 1 if they are not fixed."""
    lengths = [value.shape[i] for i in axes] if value.shape is not None else []
    if axes != (2, 3) or not all(isinstance(length, int) for length in lengths):
        return 1
    return max(
        n for n in range(1, most + 1) if all(int(str(length)) % n == 0 for length in lengths)
    )


def _settled(model: ir.Model, node: ir.Node) -> ir.Value:
    """Return the value after the norm, residual sum and activation that follow a layer.

    It is the last value that alone carries the layer's output on.
    """
    order = {other: index for index, other in enumerate(model.graph)}
    outputs = set(model.graph.outputs)
    settled = node.outputs[0]
    live = {settled}
    for other in list(model.graph)[order[node] + 1 :]:
        if live.isdisjoint(reads(other)):
            continue
        row = operator(other)
        if not (row.activation or row.follows):
            break
        live.update(other.outputs[:1])
        position = order[other]
        # A reader that has no place in the order is in a subgraph.
        live = {
            v
            for v in live
            if v in outputs or any(order.get(use.node, inf) > position for use in v.uses())
        }
        if len(live) != 1:
            continue
        (only,) = live
        if only in outputs:
            break
        settled = only
    return settled


_FEW, _MORE = 3, 5  # batches that are tried: what differs between them depends on the batch


class Origin(IntEnum):
    """What a value is computed from; of several, the largest counts."""

    CONSTANTS = 0
    SHAPES = 1
    DATA = 2


class Batches:
    """How a graph's values change with the number of samples, the first axis of its first input.

    Raises:
        SpecError: that axis has a fixed length.
    """

    def __init__(self, model: ir.Model):
        specs = [tensor_spec(value) for value in model.graph.inputs]
        batch = specs[0].shape[0] if specs and specs[0].shape else None
        if not isinstance(batch, str):
            raise SpecError(
                "early exits",
                f"need a batch of any size, but the model takes {batch} samples at a time",
                "give the first axis of its inputs a name, such as batch",
            )
        self.symbol = batch
        examples = example_inputs(specs)
        lengths = {
            axis: int(length)
            for spec in specs
            for axis, length in zip(spec.shape, examples[spec.name].shape, strict=True)
            if isinstance(axis, str)
        }
        self._tries = [
            Lengths(_with_lengths(model, {**lengths, batch: count})) for count in (_FEW, _MORE)
        ]
        self._origins = _origins(model)

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return a value's shape for a small batch, if it is known."""
        return self._tries[0].shape(value)

    def origin(self, value: ir.Value) -> Origin:
        """Return what a value is computed from."""
        return self._origins.get(value, Origin.CONSTANTS)

    def axis(self, value: ir.Value) -> int | None:
        """Return the axis that runs over the samples; ``None`` if there is none.

        Raises:
            SpecError: the value's axes are unknown, or one mixes samples with something else.
        """
        few, more = (tried.shape(value) for tried in self._tries)
        if few is None or more is None or len(few) != len(more):
            raise refused(value, "has axes whose lengths are not known")
        moving = [i for i, pair in enumerate(zip(few, more, strict=True)) if pair[0] != pair[1]]
        if not moving:
            return None
        if len(moving) > 1 or (few[moving[0]], more[moving[0]]) != (_FEW, _MORE):
            raise refused(value, f"has samples mixed with other things on axis {moving[0]}")
        return moving[0]

    def fixed(self, value: ir.Value) -> bool:
        """Return whether a value is known to have the same shape for any number of samples."""
        few, more = (tried.shape(value) for tried in self._tries)
        return few is not None and few == more

    def same_for_all(self, value: ir.Value) -> bool:
        """Return whether a value without samples is known not to change with their number."""
        if self.origin(value) is Origin.CONSTANTS:
            return True
        few, more = (tried.constant(value) for tried in self._tries)
        return few is not None and more is not None and np.array_equal(few, more)

    def counts_samples(self, node: ir.Node) -> bool:
        """Return whether a node computes the number of samples, and nothing else, as ``[1]``."""
        few, more = (tried.constant(node.outputs[0]) for tried in self._tries)
        constants = [None if x is None else (x.shape, x.tolist()) for x in (few, more)]
        return operator(node).family == "shape" and constants == [((1,), [_FEW]), ((1,), [_MORE])]


def refused(value: ir.Value, why: str = "is computed from all samples together") -> SpecError:
    """Return the error for a value that cannot be had for the remaining samples alone."""
    return SpecError(
        f"value {value.name!r}",
        f"is read after an exit, and {why}",
        "put the exit after another layer",
    )


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a node reads, in subgraphs, too."""
    for reader in (node, *inner_nodes(node)):
        yield from (value for value in reader.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().outputs


def _with_lengths(model: ir.Model, lengths: dict[str, int]) -> ir.Model:
    """Return a copy with numbers in place of dynamic lengths."""
    copy = model.clone()
    written = {v for node in copy.graph for v in node.outputs}
    for value in (*copy.graph.inputs, *written):
        if value.shape is not None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) else lengths.get(str(d.value), d) for d in value.shape]
            )
    return copy


def _origins(model: ir.Model) -> dict[ir.Value, Origin]:
    origins = dict.fromkeys((v for v in model.graph.inputs if not v.is_initializer()), Origin.DATA)
    for node in model.graph:
        family = operator(node).family
        # Of what the others are cast like, a type is read.
        read = node.inputs[:1] if family == "cast-like" else reads(node)
        origin = max((origins.get(v, Origin.CONSTANTS) for v in read if v), default=Origin(0))
        if family == "shape":
            origin = min(origin, Origin.SHAPES)
        origins.update(dict.fromkeys(node.outputs, origin))
    return origins
