"""A graph that really stops early: what comes after an exit lies in a branch of ``If``.

At each exit the samples whose head is sure enough keep its answer. The others are gathered, with
all values that later nodes read of them, and go on in the branch, which is not executed if none is
left; their answers are then written over the head's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compressor.errors import SpecError
from compressor.graph.costs import at_lengths, node_macs
from compressor.graph.editing import Chain, Editor, inner_nodes
from compressor.graph.operators import operator
from compressor.graph.values import value_by_name
from compressor.passes.train.early_exit.heads import BOOL, FLOAT, INT64, HeadWriter
from compressor.passes.train.early_exit.points import (
    Answer,
    Batches,
    Confidence,
    ExitPoint,
    Origin,
    ancestors,
    refused,
)
from compressor.types.tensors import Array


@dataclass(frozen=True)
class CutExit:
    """An exit, the confidence from which samples leave, and its head's parameters by name."""

    point: ExitPoint
    threshold: float
    parameters: Mapping[str, Array]


class _Part(Chain):
    """The nodes between two exits that have been moved here so far, in order."""

    # indices of the samples that are left among those of the part before, `[rows]`; `None` in
    # the first part
    rows: ir.Value | None = None

    def __init__(self, editor: Editor):
        super().__init__(editor)
        # what values of earlier parts are here, gathered or computed again
        self.local: dict[ir.Value, ir.Value] = {}


def cut(
    model: ir.Model, exits: Sequence[CutExit], measure: Confidence, batches: Batches, answer: Answer
) -> ir.Model:
    """Return a model that lets samples leave early, with the same inputs and outputs.

    Exits are in the order of execution; ``batches`` and ``answer`` are those of this very model,
    which is not changed.

    Raises:
        SpecError: a node after an exit reads a value that is neither each sample's own nor the
            same for any number of samples.
    """
    return _Cut(model, exits, measure, batches, answer).model()


def part_macs(model: ir.Model, points: Sequence[ExitPoint], answer: Answer) -> tuple[int, ...]:
    """Return the multiply-accumulates of each part, with the head at its end."""
    heads = [*(point.features * answer.classes for point in points), 0]
    sized = dict(zip(model.graph, at_lengths(model).graph, strict=True))
    return tuple(
        sum(node_macs(sized[node]) for node in nodes) + head
        for nodes, head in zip(_parts(model, points), heads, strict=True)
    )


def _parts(model: ir.Model, points: Sequence[ExitPoint]) -> list[list[ir.Node]]:
    """Divide the nodes: a part has those that its exit's value needs and no earlier part has."""
    values = value_by_name(model)
    ends = [*(values[point.value] for point in points), model.graph.outputs[0]]
    done: set[ir.Node] = set()
    parts = []
    for end in ends:
        needed = ancestors(end) - done
        parts.append([node for node in model.graph if node in needed])
        done |= needed
    return parts


class _Cut:
    def __init__(
        self,
        model: ir.Model,
        exits: Sequence[CutExit],
        measure: Confidence,
        batches: Batches,
        answer: Answer,
    ):
        self._exits = exits
        self._measure: Confidence = measure
        self._batches = batches
        self._model = model.clone()
        pairs = list(zip(_values(self._model), _values(model), strict=True))
        self._twins = dict(pairs)
        self._copies = {original: copy for copy, original in pairs}
        self._writer = HeadWriter(self._model, answer)
        self._editor = self._writer.editor
        self._activation = answer.activation
        self._nodes = _parts(self._model, [e.point for e in exits])
        self._part_of = {node: i for i, nodes in enumerate(self._nodes) for node in nodes}
        self._parts = [_Part(self._editor) for _ in self._nodes]
        self._named = value_by_name(self._model)

    def model(self) -> ir.Model:
        graph = self._model.graph
        (output,) = graph.outputs
        name, shape = output.name, output.shape
        graph.outputs.clear()
        graph.remove(list(graph))
        result = self._filled(0, output)
        if result is not output:
            output.name = self._editor.free_name(f"{name}.network")
            result.name, result.shape, result.type = name, shape, output.type
        graph.extend(self._parts[0].nodes)
        graph.outputs.append(result)
        return self._model

    def _filled(self, index: int, output: ir.Value) -> ir.Value:
        """Fill a part and, inside it, the later ones; return the answers of its samples."""
        part = self._parts[index]
        for node in self._nodes[index]:
            self._move(node, index)
        if index == len(self._exits):
            return output
        option = self._exits[index]
        answers, stays = self._decide(option, self._named[option.point.value], part)
        start = f"exit{option.point.number}"
        rows = part.add("NonZero", [stays], f"{start}.places", INT64)
        flat = self._constant("exits.last_axis", [-1])
        rows = part.add("Reshape", [rows, flat], f"{start}.rows", INT64)
        rows.shape = ir.Shape([ir.SymbolicDim(f"rows{index + 1}")])
        self._parts[index + 1].rows = rows
        later = self._filled(index + 1, output)
        return self._branch(index, answers, later)

    def _decide(self, option: CutExit, value: ir.Value, part: _Part) -> tuple[ir.Value, ir.Value]:
        """Add a head; return its answers, and which samples do not leave."""
        number = option.point.number
        _, nodes = self._writer.head(option.point, value, option.parameters)
        part.nodes.extend(nodes)
        logits = answers = nodes[-1].outputs[0]
        if self._activation is not None:
            part.nodes.append(self._writer.activation(self._activation, logits, number))
            answers = part.nodes[-1].outputs[0]
        nodes = self._writer.confidence(logits, self._measure, number)
        part.nodes.extend(nodes)
        threshold = self._editor.constant(
            f"exit{number}.threshold", np.asarray(option.threshold, np.float32)
        )
        # A confidence that is not a number reaches no threshold.
        sure = part.add(
            "GreaterOrEqual", [nodes[-1].outputs[0], threshold], f"exit{number}.leaves", BOOL
        )
        return answers, part.add("Not", [sure], f"exit{number}.stays", BOOL)

    def _branch(self, index: int, answers: ir.Value, later: ir.Value) -> ir.Value:
        """Add the ``If``: with samples left, the later parts are executed, else nothing."""
        number = self._exits[index].point.number
        part, inner = self._parts[index], self._parts[index + 1]
        assert inner.rows is not None
        columns = self._constant("exits.columns", [1])
        places = inner.add("Unsqueeze", [inner.rows, columns], f"exit{number}.written", INT64)
        merged = inner.add("ScatterND", [answers, places, later], f"exit{number}.merged", FLOAT)
        empty = _Part(self._editor)
        kept = empty.add("Identity", [answers], f"exit{number}.kept", FLOAT)
        merged.shape = kept.shape = answers.shape
        count = part.add("Size", [inner.rows], f"exit{number}.count", INT64)
        none = self._editor.shared_constant("exits.none", np.asarray(0, np.int64))
        some = part.add("Greater", [count, none], f"exit{number}.continues", BOOL)
        name = self._editor.free_name(f"exit{number}.answers")
        result = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=answers.shape)
        branches = [
            ir.AttrGraph("then_branch", self._graph(inner, merged, f"after_exit{number}")),
            ir.AttrGraph("else_branch", self._graph(empty, kept, f"all_left_at_exit{number}")),
        ]
        part.nodes.append(
            ir.Node("", "If", [some], branches, outputs=[result], name=f"exit{number}")
        )
        return result

    def _graph(self, part: _Part, output: ir.Value, name: str) -> ir.Graph:
        opsets = self._model.graph.opset_imports
        return ir.Graph([], [output], nodes=part.nodes, opset_imports=opsets, name=name)

    def _move(self, node: ir.Node, index: int) -> None:
        """Put a node into its part, and make it read that part's values.

        Raises:
            SpecError: it would be computed from fewer samples than before.
        """
        if index:
            for value in node.outputs:
                original = self._twins[value]
                data = self._batches.origin(original) is Origin.DATA
                if data and self._batches.fixed(original):
                    raise refused(original)
            self._redirect(node, index)
            for value in node.outputs:
                if value.name:
                    value.name = self._editor.free_name(f"{value.name}.rows{index}")
                value.shape = self._shape(value, index)
        self._parts[index].nodes.append(node)

    def _redirect(self, node: ir.Node, index: int) -> None:
        for reader in (node, *inner_nodes(node)):
            for place, value in enumerate(reader.inputs):
                if value is not None:
                    reader.replace_input_with(place, self._here(value, index))
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                outputs = attribute.as_graph().outputs
                for place, value in enumerate(list(outputs)):
                    if (here := self._here(value, index)) is not value:
                        outputs[place] = here

    def _shape(self, value: ir.Value, index: int) -> ir.Shape | None:
        if value.shape is None:
            return None
        left = ir.SymbolicDim(f"rows{index}")
        batch = self._batches.symbol
        return ir.Shape(
            [left if not isinstance(d, int) and d.value == batch else d for d in value.shape]
        )

    def _here(self, value: ir.Value, index: int) -> ir.Value:
        """Return the counterpart of a value in a part, for this part's samples only."""
        node = value.producer()
        made = self._part_of.get(node, index) if node is not None else 0
        original = self._twins.get(value)
        if original is None or value.is_initializer() or made >= index:
            return value  # of this part, constant, or of a subgraph
        local = self._parts[index].local
        if value not in local:
            local[value] = self._crossing(value, original, index)
        return local[value]

    def _crossing(self, value: ir.Value, original: ir.Value, index: int) -> ir.Value:
        origin = self._batches.origin(original)
        node = value.producer()
        if origin is Origin.CONSTANTS:
            return value
        if node is not None and origin is Origin.SHAPES:
            same = self._batches.same_for_all(original)
            return value if same else self._again(node, value, index)
        if node is not None and operator(node).dequantizes:
            return self._again(node, value, index)  # beside its reader, so that they fuse
        axis = self._batches.axis(original)
        if axis is None:
            raise refused(original)
        rows = self._parts[index].rows
        assert rows is not None
        outer, name = self._here(value, index - 1), f"{value.name}.left{index}"
        kept = self._parts[index].add("Gather", [outer, rows], name, value.dtype, {"axis": axis})
        kept.shape = self._shape(original, index)
        return kept

    def _again(self, node: ir.Node, value: ir.Value, index: int) -> ir.Value:
        """Compute a value of an earlier part again, for this part's samples."""
        part = self._parts[index]
        original = self._twins[value].producer()
        if original is not None and self._batches.counts_samples(original):
            assert part.rows is not None
            return part.add("Shape", [part.rows], f"{value.name}.left{index}", INT64)
        if inner_nodes(node) or original is None:
            raise SpecError(
                f"node {node.name!r}",
                f"is {node.op_type}, which would have to be computed again for fewer samples",
                "put the exit after another layer",
            )
        outputs = [
            ir.Value(
                name=self._editor.free_name(f"{v.name}.left{index}") if v.name else v.name,
                type=v.type,
                shape=self._shape(v, index),
            )
            for v in original.outputs
        ]
        inputs = [
            None if v is None else self._here(self._copies[v], index) for v in original.inputs
        ]
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            outputs=outputs,
            version=node.version,
            name=outputs[0].name,
        )
        part.nodes.append(copy)
        part.local.update(zip(node.outputs, outputs, strict=True))
        return part.local[value]

    def _constant(self, name: str, values: list[int]) -> ir.Value:
        return self._editor.shared_constant(name, np.asarray(values, np.int64))


def _values(model: ir.Model) -> list[ir.Value]:
    """Return the values of the main graph, in an order that clones share."""
    nodes = [value for node in model.graph for value in node.outputs]
    return [*model.graph.inputs, *model.graph.initializers.values(), *nodes]
