"""What the executor refuses, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from compressor.errors import ModelError
from compressor.models.executor import GraphModule
from tests.compressor.models.executor.linear_graphs import graph_of, linear_graph


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            [helper.make_node("Bernoulli", ["x"], ["y"], name="coin")],
            r"node 'coin' \(Bernoulli, opset 21\): the operator is not supported",
        ),
        (
            [helper.make_node("Relu", ["x"], ["y"], domain="mine")],
            r"\(mine.Relu, opset 1\): the operator is not supported",
        ),
        (
            [helper.make_node("Relu", ["x"], ["y"], name="n", slope=0.5)],
            r"node 'n' \(Relu, opset 21\): attribute 'slope' is not supported",
        ),
        (
            [helper.make_node("LRN", ["x"], ["y"], name="n")],
            "attribute 'size' is missing",
        ),
        (
            [helper.make_node("Pad", ["x", "x"], ["y"], mode="mirror")],
            "attribute 'mode' is 'mirror', not one of constant, reflect, edge, wrap",
        ),
        (
            [helper.make_node("Softmax", ["x"], ["y"], axis=0.5)],
            "attribute 'axis' is FLOAT, not INT",
        ),
        (
            [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING)],
            "asks for elements of type STRING",
        ),
        (
            [helper.make_node("Relu", ["nowhere"], ["y"])],
            "'nowhere': it is read, but no node",
        ),
        (
            [helper.make_node("Relu", ["x", "x"], ["y"])],
            r"\(Relu, opset 21\): it has 2 inputs, which the operator does not take",
        ),
        (
            [helper.make_node("MatMul", ["x"], ["y"])],
            r"\(MatMul, opset 21\): it has 1 inputs, which the operator does not take",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_on_construction(nodes: list[Any], message: str) -> None:
    model = graph_of(nodes, {})
    with pytest.raises(ModelError, match=message):
        GraphModule(model)


def test_an_output_that_is_not_given_is_refused_where_it_is_read() -> None:
    norm = helper.make_node("BatchNormalization", ["x", "s", "s", "s", "s"], ["y", "mean"])
    weights = {"s": np.ones(3, np.float32)}
    GraphModule(graph_of([norm], weights))
    with pytest.raises(ModelError, match=r"output 1 \('mean'\) is not supported"):
        GraphModule(graph_of([norm, helper.make_node("Relu", ["mean"], ["z"])], weights))


@pytest.mark.parametrize("opset", [12, 29])
def test_opsets_outside_the_range(opset: int) -> None:
    with pytest.raises(ModelError, match=f"opset {opset} is outside 13 to 28"):
        GraphModule(linear_graph(opset))


def test_strings_are_refused() -> None:
    with pytest.raises(ModelError, match="input 'x': it holds strings"):
        GraphModule(graph_of([helper.make_node("Identity", ["x"], ["y"])], {}, 21, 8))


def test_initializers_without_a_value() -> None:
    model = linear_graph()
    model.graph.initializers["block.0"].const_value = None
    with pytest.raises(ModelError, match=r"initializer 'block\.0': it has no value"):
        GraphModule(model)
    GraphModule(model, {"block.0": torch.zeros(4)})


@pytest.mark.parametrize(
    ("arguments", "inputs", "message"),
    [
        ((), {}, "input 'x': is missing"),
        ((), {"z": torch.zeros(1)}, "input 'z': is not in the graph"),
        ((np.zeros((2, 3)),), {}, "input 'x': is of type ndarray; give a tensor of"),
        ((torch.zeros(2, 3),), {"x": torch.zeros(2, 3)}, "input 'x': is given twice"),
        ((torch.zeros(2, 3),) * 2, {}, "2 inputs are given, it has 1"),
    ],
)
def test_wrong_calls(
    arguments: tuple[torch.Tensor, ...], inputs: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        GraphModule(linear_graph())(*arguments, **inputs)


def test_a_failing_node_is_named() -> None:
    with pytest.raises(ModelError, match=r"node 'product' .* float32\[2, 5\], float32\[3, 4\]"):
        GraphModule(linear_graph())(torch.zeros(2, 5))
