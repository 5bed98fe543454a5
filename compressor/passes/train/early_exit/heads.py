"""Heads of early exits: nodes of a graph, what they start with, and what they learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from torch import Tensor

from compressor.graph.editing import Attributes, Editor
from compressor.graph.values import value_by_name
from compressor.models.torch.lowering import NamedModule
from compressor.passes.train.early_exit.points import Answer, Confidence, ExitPoint
from compressor.passes.train.job import Micro, Objective
from compressor.passes.train.losses import kl_divergence
from compressor.types.tensors import Array

_EPSILON = 1e-5
_STATISTICS = ("mean", "scale")
_Add: TypeAlias = Callable[..., ir.Value]
FLOAT, INT64, BOOL = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BOOL


@dataclass(frozen=True)
class HeadNames:
    """Names of what a head adds to a graph."""

    # its initializers, by the names that :func:`initial_parameters` gives them
    tensors: Mapping[str, str]
    features: str  # value `[batch, features]` that the linear layer, or its norm, reads
    logits: str  # value `[batch, classes]`

    @property
    def parameters(self) -> tuple[str, ...]:
        """The initializers that are trained."""
        return tuple(name for key, name in self.tensors.items() if key not in _STATISTICS)


class HeadWriter:
    """Adds heads to a graph, in place, with operators of opset 18 or newer."""

    def __init__(self, model: ir.Model, answer: Answer):
        self.editor = Editor(model)
        self._classes = answer.classes

    def head(
        self, point: ExitPoint, value: ir.Value, parameters: Mapping[str, Array]
    ) -> tuple[HeadNames, list[ir.Node]]:
        """Make a head's nodes, in order; adds the parameters to the graph, but not the nodes.

        Parameters are named as by :func:`initial_parameters`; with ``mean`` and ``scale``, the
        features are standardized first.
        """
        start, made = f"exit{point.number}", list[ir.Node]()
        add = self._adder(made, start, point.features)
        tensors: dict[str, str] = {}

        def constant(name: str) -> ir.Value:
            value = self.editor.constant(f"{start}.{name}", parameters[name])
            tensors[name] = value.name or ""
            return value

        quantizer = value.producer()
        if value.dtype != FLOAT and quantizer is not None:  # a pooling reads codes, say
            sides = [side for side in quantizer.inputs[1:] if side is not None]
            shape, value = value.shape, add("DequantizeLinear", [value, *sides], "floats")
            value.shape = shape
        value = features = self._pooled(point, value, add)
        if point.head == "norm-linear":
            sides = [constant("norm.weight"), constant("norm.bias")]
            attributes: Attributes = {"axis": -1, "epsilon": _EPSILON}
            value = add("LayerNormalization", [value, *sides], "norm", attributes)
        elif "mean" in parameters:
            value = add("Sub", [value, constant("mean")], "centred")
            value = add("Mul", [value, constant("scale")], "standardized")
        weight, bias = constant("weight"), constant("bias")
        logits = add("Gemm", [value, weight, bias], "logits", {"transB": 1})
        logits.shape = _rows(self._classes)
        return HeadNames(tensors, features.name or "", logits.name or ""), made

    def _adder(self, made: list[ir.Node], start: str, *lengths: int) -> _Add:
        """Return a function that appends a node to ``made``, with output ``[batch, *lengths]``."""

        def add(
            operator: str, inputs: list[ir.Value], name: str, attributes: Attributes | None = None
        ) -> ir.Value:
            made.append(self.editor.node(operator, inputs, f"{start}.{name}", FLOAT, attributes))
            made[-1].outputs[0].shape = _rows(*lengths)
            return made[-1].outputs[0]

        return add

    def _pooled(self, point: ExitPoint, value: ir.Value, add: _Add) -> ir.Value:
        """Average over positions; return ``[batch, features]``."""
        if point.kernel:
            attributes = {"kernel_shape": point.kernel, "strides": point.kernel}
            value = add("AveragePool", [value], "parts", attributes)
            value.shape = _rows(point.channels, point.grid, point.grid)
            flat = np.asarray([0, point.features], np.int64)
            shape = self.editor.constant(f"exit{point.number}.shape", flat)
            return add("Reshape", [value, shape], "features")
        if not point.averaged:
            return value
        axes = np.asarray(point.averaged, np.int64)
        places = self.editor.constant(f"exit{point.number}.axes", axes)
        return add("ReduceMean", [value, places], "features", {"keepdims": 0})

    def activation(self, like: ir.Node, logits: ir.Value, number: int) -> ir.Node:
        """Make the node that turns a head's logits into the model's output."""
        axis = like.attributes.get_int("axis", -1)
        name = f"exit{number}.output"
        node = self.editor.node(like.op_type, [logits], name, FLOAT, {"axis": axis})
        node.outputs[0].shape = logits.shape
        return node

    def confidence(self, logits: ir.Value, measure: Confidence, number: int) -> list[ir.Node]:
        """Make the nodes of a confidence, 0 to 1, ``[batch]``, which is the last one's output.

        It is the largest probability, its margin over the second, or one minus the entropy, which
        is 1 for a uniform distribution.
        """
        start, made = f"exit{number}", list[ir.Node]()
        add = self._adder(made, start)
        last = self.editor.shared_constant("exits.last_axis", np.asarray([-1], np.int64))
        if measure == "entropy":
            logs = add("LogSoftmax", [logits], "log_probability", {"axis": -1})
            each = add("Mul", [add("Exp", [logs], "probability"), logs], "information")
            total = add("ReduceSum", [each, last], "negative_entropy", {"keepdims": 0})
            most = np.asarray(log(self._classes), np.float32)
            one = self.editor.shared_constant("exits.one", np.asarray(1, np.float32))
            largest = self.editor.shared_constant("exits.most_entropy", most)
            add("Add", [add("Div", [total, largest], "certainty"), one], "confidence")
            return made
        probability = add("Softmax", [logits], "probability", {"axis": -1})
        if measure == "probability":
            add("ReduceMax", [probability, last], "confidence", {"keepdims": 0})
            return made
        two = self.editor.shared_constant("exits.two", np.asarray([2], np.int64))
        values = ir.Value(name=self.editor.free_name(f"{start}.two"), type=ir.TensorType(FLOAT))
        places = ir.Value(name=self.editor.free_name(f"{start}.which"), type=ir.TensorType(INT64))
        made.append(ir.node("TopK", [probability, two], {"axis": -1}, outputs=[values, places]))
        made[-1].name = values.name
        signs = self.editor.shared_constant("exits.signs", np.asarray([1, -1], np.float32))
        signed = add("Mul", [values, signs], "signed")
        add("ReduceSum", [signed, last], "confidence", {"keepdims": 0})
        return made


def initial_parameters(point: ExitPoint, classes: int, seed: int) -> dict[str, Array]:
    """Return the initial parameters of a head: a linear layer's usual uniform numbers.

    They are ``weight`` ``[classes, features]``, ``bias`` ``[classes]``, and if there is a layer
    norm ``norm.weight`` and ``norm.bias`` ``[features]``.
    """
    rng = np.random.default_rng((seed, point.number))
    bound = 1 / sqrt(point.features)
    parameters = {
        "weight": rng.uniform(-bound, bound, (classes, point.features)).astype(np.float32),
        "bias": np.zeros(classes, np.float32),
    }
    if point.head == "norm-linear":
        parameters["norm.weight"] = np.ones(point.features, np.float32)
        parameters["norm.bias"] = np.zeros(point.features, np.float32)
    return parameters


def folded(model: ir.Model, head: HeadNames) -> dict[str, Array]:
    """Return a head's parameters, with ``mean`` and ``scale``, if any, folded into its weight."""
    parameters = {}
    for key, name in head.tensors.items():
        tensor = model.graph.initializers[name].const_value
        assert tensor is not None
        parameters[key] = tensor.numpy()
    rest = {n: array for n, array in parameters.items() if n not in _STATISTICS}
    if "mean" in parameters:
        weight = parameters["weight"].astype(np.float64) * parameters["scale"]
        rest["weight"] = weight.astype(np.float32)
        rest["bias"] = (parameters["bias"] - weight @ parameters["mean"]).astype(np.float32)
    return rest


@dataclass(frozen=True)
class WithHeads:
    """A graph that returns the answers of all exits beside the model's own."""

    # its outputs are the model's own, the logits if they are another value, and each head's logits
    model: ir.Model
    heads: tuple[HeadNames, ...]  # names, exit by exit
    teacher: str  # name of the output with the model's logits


def with_heads(
    model: ir.Model,
    points: Sequence[ExitPoint],
    answer: Answer,
    parameters: Sequence[Mapping[str, Array]],
) -> WithHeads:
    """Add heads to a copy of a graph, which runs as a whole and returns all answers."""
    copy = model.clone()
    values = value_by_name(copy)
    writer = HeadWriter(copy, answer)
    names = []
    if answer.activation is not None:
        copy.graph.outputs.append(values[answer.logits])
    for point, arrays in zip(points, parameters, strict=True):
        head, nodes = writer.head(point, values[point.value], arrays)
        copy.graph.extend(nodes)
        copy.graph.outputs.append(nodes[-1].outputs[0])
        names.append(head)
    return WithHeads(copy, tuple(names), answer.logits)


def with_confidences(
    headed: WithHeads, measure: Confidence, answer: Answer
) -> tuple[ir.Model, tuple[str, ...]]:
    """Add to a graph with heads the outputs that exits decide by.

    Returns:
        A model with the confidences, see :func:`confidence_name`, and the answers as further
        outputs; and the names of the answers: each exit's, and last the model's own.
    """
    copy = headed.model.clone()
    values, outputs = value_by_name(copy), copy.graph.outputs
    answers = []
    writer = HeadWriter(copy, answer)
    for number, head in enumerate(headed.heads, start=1):
        nodes = writer.confidence(values[head.logits], measure, number)
        nodes[-1].outputs[0].name = confidence_name(number)
        outputs.append(nodes[-1].outputs[0])
        answers.append(values[head.logits])
        if answer.activation is not None:
            nodes.append(writer.activation(answer.activation, answers[-1], number))
            answers[-1] = nodes[-1].outputs[0]
            outputs.append(answers[-1])
        copy.graph.extend(nodes)
    return copy, tuple(value.name or "" for value in (*answers, outputs[0]))


def confidence_name(number: int) -> str:
    """Return the name of an exit's confidence among the outputs."""
    return f"exit{number}.confidence"


def _rows(*lengths: int) -> ir.Shape:
    return ir.Shape([ir.SymbolicDim(None), *lengths])


class FrozenTrunk(NamedModule):
    """A module that stays in evaluation mode, so with its statistics, while heads are trained."""

    def train(self, mode: bool = True) -> FrozenTrunk:
        """Stay in evaluation mode."""
        super().train(False)
        return self


@dataclass(frozen=True)
class SelfDistillation:
    """The loss of exits, against the labels and the network's own answer.

    L. Zhang et al., Be your own teacher, 2019 (arXiv:1905.08094), section 3.2, without the feature
    loss. Gradients do not flow into the teacher, the output with the network's own logits.
    """

    exits: Sequence[str]
    teacher: str
    alpha: float  # weight of the labels; the network's answer gets the rest
    temperature: float
    # the loss of each exit against the labels; empty where alpha is 0
    labelled: Mapping[str, Objective]
    network: Objective | None = None  # the loss of the network itself, if it is trained, too

    def losses(self, outputs: Mapping[str, Tensor], micro: Micro, step: int) -> dict[str, Tensor]:
        """Return one term for each exit, and one for the network if it is trained."""
        teacher = outputs[self.teacher].detach()
        terms = {} if self.network is None else dict(self.network.losses(outputs, micro, step))
        for number, name in enumerate(self.exits, start=1):
            soft = kl_divergence(outputs[name], teacher, self.temperature)
            term = (1 - self.alpha) * soft
            if name in self.labelled:
                hard = self.labelled[name].losses(outputs, micro, step)
                term = term + self.alpha * sum(hard.values())
            terms[f"exit {number}"] = term
        return terms
