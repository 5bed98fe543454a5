"""Options of early exits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx_ir as ir
from pydantic import Field

from compressor.errors import SpecError, suggestion
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.passes.train.early_exit.batches import Batches, reads
from compressor.types.layers import Layer
from compressor.types.options import Options

Confidence: TypeAlias = Literal["probability", "entropy", "margin"]
Head: TypeAlias = Literal["linear", "norm-linear"]


class Exit(Options):
    """A place where samples may leave the network."""

    after: str = Field(
        description="a layer, or the part of the network that several are in, such as layer2 for "
        "layer2.0.conv1 and layer2.1.conv2; the exit lies after its last layer, and the "
        "normalization, residual sum and activation that directly follow"
    )
    head: Head = Field(
        default="linear",
        description="linear: means over places or tokens, and a linear layer; norm-linear: with a "
        "layer norm between the two",
    )
    grid: int = Field(
        default=4,
        ge=1,
        description="pictures are averaged over a grid of so many by so many parts, or the most "
        "below that their height and width divide into; 1 is the mean over all places",
    )


@dataclass(frozen=True)
class ExitPoint:
    """A value that a head reads.

    Attributes:
        number: of the exit, from 1.
        after: as the option names it.
        layer: the last layer before it.
        value: name of the value, ``[batch, ...]`` float32.
        channels: length of the axis that the head does not average over.
        averaged: the other axes but the batch's.
        grid: of two such axes, in how many parts each is averaged.
        kernel: lengths of these parts; empty where there is one.
        head: what kind.
    """

    number: int
    after: str
    layer: Layer
    value: str
    channels: int
    averaged: tuple[int, ...]
    grid: int
    kernel: tuple[int, ...]
    head: Head

    @property
    def features(self) -> int:
        """How many numbers of a sample the head's linear layer reads."""
        return self.channels * self.grid**2


@dataclass(frozen=True)
class Answer:
    """What a classifier answers.

    Attributes:
        logits: name of the value that holds them, ``[batch, classes]``.
        classes: how many.
        activation: the softmax that makes the model's output of them; ``None`` where they are it.
    """

    logits: str
    classes: int
    activation: ir.Node | None


def find_answer(model: ir.Model, batches: Batches) -> Answer:
    """Find the logits of a classifier.

    Raises:
        SpecError: the model is none: it has several outputs, or one that is no ``[batch, classes]``
            of float32.
    """
    outputs = model.graph.outputs
    output = outputs[0]
    shape = batches.shape(output)
    if len(outputs) != 1 or shape is None or len(shape) != 2 or batches.axis(output) != 0:
        shown = ", ".join(f"{v.name} {v.shape}" for v in outputs)
        raise SpecError(
            "early exits",
            f"need a classifier with one output [batch, classes], and the model gives {shown}",
            "use it for such a model",
        )
    if output.dtype != ir.DataType.FLOAT or shape[1] < 2:
        raise SpecError(
            f"output {output.name!r}",
            f"is {output.dtype} with {shape[1]} classes, exits need float32 and two or more",
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
    known = {v.name: v for node in model.graph for v in node.outputs}
    logits = ancestors(known[answer.logits])
    for index, point in enumerate(points):
        where = f"exits.{index}.after"
        value = known[point.value]
        if value.producer() not in logits or point.value == answer.logits:
            raise SpecError(
                where,
                f"is {point.after!r}, after which nothing is left to skip",
                "name an earlier layer",
            )
        before = points[index - 1] if index else None
        if before is None:
            continue
        if before.value == point.value:
            problem = f"is {point.after!r}, the same place as {before.after!r}"
            raise SpecError(where, problem, "name each place once")
        if known[before.value].producer() not in ancestors(value):
            raise SpecError(
                where,
                f"is {point.after!r}, which is not computed from {before.after!r}",
                "list exits in the order of execution",
            )
    return points


def ancestors(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that a value is computed by."""
    found: set[ir.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            pending.extend(reads(node))
    return found


def _point(model: ir.Model, number: int, option: Exit, batches: Batches) -> ExitPoint:
    where = f"exits.{number - 1}.after"
    found = [(layer, node) for layer, node in layers_with_nodes(model) if node.graph is model.graph]
    names = [layer.name for layer, _ in found]
    own = [entry for entry in found if f"{entry[0].name}.".startswith(f"{option.after}.")]
    if not own:
        parts = {".".join(n.split(".")[:k]) for n in names for k in range(1, n.count(".") + 1)}
        close = suggestion(option.after, [*names, *sorted(parts)])
        raise SpecError(where, f"is {option.after!r}, which is no layer", close)
    layer, node = own[-1]
    value = _settled(model, node)
    shape = batches.shape(value)
    if shape is None or len(shape) < 2 or batches.axis(value) != 0:
        raise SpecError(
            where,
            f"is {option.after!r}, whose output {value.name!r} is not [batch, channels, ...]",
            "name another layer",
        )
    if value.dtype != ir.DataType.FLOAT:
        raise SpecError(
            where,
            f"is {option.after!r}, whose output is {value.dtype}; heads read float32",
            "put early-exit before cast",
        )
    channels = 1 if layer.is_convolution else len(shape) - 1
    averaged = tuple(i for i in range(1, len(shape)) if i != channels)
    grid = _grid(value, averaged, option.grid)
    kernel = tuple(shape[i] // grid for i in averaged) if grid > 1 else ()
    name = value.name or ""
    return ExitPoint(
        number, option.after, layer, name, shape[channels], averaged, grid, kernel, option.head
    )


def _grid(value: ir.Value, axes: Sequence[int], most: int) -> int:
    """Return in how many parts height and width are averaged: 1 where they are not fixed."""
    lengths = [value.shape[i] for i in axes] if value.shape is not None else []
    if axes != (2, 3) or not all(isinstance(length, int) for length in lengths):
        return 1
    return max(
        n for n in range(1, most + 1) if all(int(str(length)) % n == 0 for length in lengths)
    )


def _settled(model: ir.Model, node: ir.Node) -> ir.Value:
    """Return the value after what follows a layer without products: norm, sum and activation.

    It is the last one that alone carries on what the layer gave.
    """
    order = {other: index for index, other in enumerate(model.graph)}
    outputs = set(model.graph.outputs)
    found = node.outputs[0]
    live = {found}
    for other in list(model.graph)[order[node] + 1 :]:
        if live.isdisjoint(reads(other)):
            continue
        row = operator(other)
        if not (row.activation or row.follows):
            break
        live.update(other.outputs[:1])
        live = {v for v in live if v in outputs or _last_reader(v, order) > order[other]}
        if len(live) != 1:
            continue
        (only,) = live
        if only in outputs:
            break
        found = only
    return found


def _last_reader(value: ir.Value, order: dict[ir.Node, int]) -> int:
    """Return the place of the last node that reads a value, itself or in a subgraph."""
    return max((order.get(use.node, len(order)) for use in value.uses()), default=-1)
