"""ONNX networks as other people write them: subgraphs, old opsets, halves, private domains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = dict[str, np.ndarray]
FLOAT, HALF, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT64,
    TensorProto.BOOL,
)
node = helper.make_node
value = helper.make_tensor_value_info


@dataclass(frozen=True)
class Wild:
    """A network, and inputs for it.

    Attributes:
        model: the network.
        inputs: returns inputs for a seed.
        weights: names of the layers whose weights it holds, in no order.
    """

    model: onnx.ModelProto
    inputs: Callable[[int], Arrays]
    layers: frozenset[str]


def made(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    arrays: Arrays,
    opset: int = 17,
    domains: Sequence[str] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """Make a model."""
    graph = helper.make_graph(
        nodes, "wild", inputs, outputs, [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


def matrix(rows: int, columns: int, seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Return a random weight."""
    scale = rows**-0.5
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(dtype)


def rows(seed: int, columns: int = 64, dtype: Any = np.float32) -> np.ndarray:
    """Return random rows."""
    return np.random.default_rng(100 + seed).standard_normal((4, columns)).astype(dtype)


def _body(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    arrays: Arrays,
) -> onnx.GraphProto:
    tensors = [numpy_helper.from_array(a, n) for n, a in arrays.items()]
    return helper.make_graph(nodes, name, inputs, outputs, tensors)


def branches(opset: int = 17) -> Wild:
    """Two branches with a weight each, one an initializer and one a constant's value."""
    first = _body(
        "first",
        [node("MatMul", ["h", "first.weight"], ["a"]), node("Relu", ["a"], ["first_out"])],
        [],
        [value("first_out", FLOAT, ["n", 32])],
        {"first.weight": matrix(64, 32, 1)},
    )
    tensor = numpy_helper.from_array(matrix(64, 32, 2), "second.weight")
    second = _body(
        "second",
        [
            node("Constant", [], ["second.weight"], value=tensor),
            node("MatMul", ["h", "second.weight"], ["second_out"]),
        ],
        [],
        [value("second_out", FLOAT, ["n", 32])],
        {},
    )
    nodes = [
        node("MatMul", ["x", "entry.weight"], ["h"]),
        node("If", ["flag"], ["y"], then_branch=first, else_branch=second),
        node("MatMul", ["y", "exit.weight"], ["z"]),
    ]
    arrays = {"entry.weight": matrix(64, 64, 3), "exit.weight": matrix(32, 16, 4)}
    model = made(
        nodes,
        [value("x", FLOAT, ["n", 64]), value("flag", BOOL, [])],
        [value("z", FLOAT, ["n", 16])],
        arrays,
        opset,
    )
    return Wild(
        model,
        lambda seed: {"x": rows(seed), "flag": np.array(seed % 2 == 0)},
        frozenset({"entry", "exit", "first", "second"}),
    )


def untaken(inside: bool) -> Wild:
    """A condition that is always true; what the other branch reads lies outside of it.

    Args:
        inside: all of it is in a branch that is taken or not.
    """
    then = _body("then", [node("Relu", ["h"], ["t"])], [], [value("t", FLOAT, ["n", 64])], {})
    other = _body(
        "other",
        [node("Unsqueeze", ["size", "axis"], ["sizes"]), node("Expand", ["h", "sizes"], ["o"])],
        [],
        [value("o", FLOAT, ["n", 64])],
        {"axis": np.array([0])},
    )
    steps = [
        node("Constant", [], ["size"], value=numpy_helper.from_array(np.array(64))),
        node("If", ["always"], ["y"], then_branch=then, else_branch=other),
    ]
    read = {"always": np.array(True)}
    arrays = {"entry.weight": matrix(64, 64, 3), "exit.weight": matrix(64, 16, 4)}
    inputs = [value("x", FLOAT, ["n", 64])]
    if inside:
        outer = _body("outer", steps, [], [value("y", FLOAT, ["n", 64])], read)
        same = _body("same", [node("Abs", ["h"], ["s"])], [], [value("s", FLOAT, ["n", 64])], {})
        steps = [node("If", ["flag"], ["w"], then_branch=outer, else_branch=same)]
        inputs.append(value("flag", BOOL, []))
    nodes = [
        node("MatMul", ["x", "entry.weight"], ["h"]),
        *steps,
        node("MatMul", ["w" if inside else "y", "exit.weight"], ["z"]),
    ]
    outputs = [value("z", FLOAT, ["n", 16])]
    model = made(nodes, inputs, outputs, arrays if inside else {**arrays, **read})
    return Wild(
        model,
        lambda seed: {"x": rows(seed), **({"flag": np.array(seed % 2 == 0)} if inside else {})},
        frozenset({"entry", "exit"}),
    )


def loop(opset: int = 17) -> Wild:
    """A recurrence written as a loop; the body reads a value from outside too."""
    body = _body(
        "body",
        [
            node("MatMul", ["state", "step.weight"], ["m"]),
            node("Add", ["m", "h"], ["a"]),
            node("Tanh", ["a"], ["next"]),
            node("Identity", ["go"], ["go_on"]),
        ],
        [value("i", INT64, []), value("go", BOOL, []), value("state", FLOAT, ["n", 64])],
        [value("go_on", BOOL, []), value("next", FLOAT, ["n", 64])],
        {"step.weight": matrix(64, 64, 5)},
    )
    nodes = [
        node("MatMul", ["x", "entry.weight"], ["h"]),
        node("Loop", ["times", "", "h"], ["y"], body=body),
        node("MatMul", ["y", "exit.weight"], ["z"]),
    ]
    arrays = {"entry.weight": matrix(64, 64, 6), "exit.weight": matrix(64, 16, 7)}
    model = made(
        nodes,
        [value("x", FLOAT, ["n", 64]), value("times", INT64, [])],
        [value("z", FLOAT, ["n", 16])],
        arrays,
        opset,
    )
    return Wild(
        model,
        lambda seed: {"x": rows(seed), "times": np.array(2 + seed)},
        frozenset({"entry", "exit", "step"}),
    )


def scan(opset: int = 17) -> Wild:
    """A recurrence over the rows of its input."""
    body = _body(
        "body",
        [
            node("MatMul", ["state", "step.weight"], ["m"]),
            node("Add", ["m", "row"], ["a"]),
            node("Tanh", ["a"], ["next"]),
            node("Identity", ["next"], ["seen"]),
        ],
        [value("state", FLOAT, [1, 64]), value("row", FLOAT, [64])],
        [value("next", FLOAT, [1, 64]), value("seen", FLOAT, [1, 64])],
        {"step.weight": matrix(64, 64, 8)},
    )
    nodes = [
        node("MatMul", ["x", "entry.weight"], ["h"]),
        node("Scan", ["start", "h"], ["last", "all"], body=body, num_scan_inputs=1),
        node("MatMul", ["all", "exit.weight"], ["z"]),
    ]
    arrays = {
        "entry.weight": matrix(64, 64, 9),
        "exit.weight": matrix(64, 16, 10),
        "start": np.zeros((1, 64), np.float32),
    }
    model = made(
        nodes, [value("x", FLOAT, [4, 64])], [value("z", FLOAT, [4, 1, 16])], arrays, opset
    )
    return Wild(model, lambda seed: {"x": rows(seed)}, frozenset({"entry", "exit", "step"}))


def halves() -> Wild:
    """All in float16, inputs and outputs too."""
    nodes = [
        node("MatMul", ["x", "one.weight"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("Gemm", ["b", "two.weight", "two.bias"], ["z"], transB=1),
    ]
    arrays = {
        "one.weight": matrix(64, 64, 11, np.float16),
        "two.weight": matrix(32, 64, 12, np.float16),
        "two.bias": np.linspace(-1, 1, 32).astype(np.float16),
    }
    model = made(nodes, [value("x", HALF, ["n", 64])], [value("z", HALF, ["n", 32])], arrays)
    return Wild(model, lambda seed: {"x": rows(seed, dtype=np.float16)}, frozenset({"one", "two"}))


def halves_inside() -> Wild:
    """Float16 weights and arithmetic between float32 inputs and outputs."""
    nodes = [
        node("Cast", ["x"], ["xh"], to=HALF),
        node("MatMul", ["xh", "one.weight"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("MatMul", ["b", "two.weight"], ["c"]),
        node("Cast", ["c"], ["z"], to=FLOAT),
    ]
    arrays = {
        "one.weight": matrix(64, 64, 13, np.float16),
        "two.weight": matrix(64, 32, 14, np.float16),
    }
    model = made(nodes, [value("x", FLOAT, ["n", 64])], [value("z", FLOAT, ["n", 32])], arrays)
    return Wild(model, lambda seed: {"x": rows(seed)}, frozenset({"one", "two"}))


def contrib() -> Wild:
    """Operators of ONNX Runtime's own domain."""
    nodes = [
        node("MatMul", ["x", "one.weight"], ["a"]),
        node("BiasGelu", ["a", "one.bias"], ["b"], domain="com.microsoft"),
        node("MatMul", ["b", "two.weight"], ["z"]),
    ]
    arrays = {
        "one.weight": matrix(64, 64, 15),
        "one.bias": np.linspace(-1, 1, 64).astype(np.float32),
        "two.weight": matrix(64, 32, 16),
    }
    model = made(
        nodes,
        [value("x", FLOAT, ["n", 64])],
        [value("z", FLOAT, ["n", 32])],
        arrays,
        domains=["com.microsoft"],
    )
    return Wild(model, lambda seed: {"x": rows(seed)}, frozenset({"one", "two"}))


def foreign() -> Wild:
    """An operator that only its makers' runtime has."""
    nodes = [
        node("MatMul", ["x", "one.weight"], ["a"]),
        node("Swirl", ["a"], ["b"], "swirl", domain="com.acme", strength=3),
        node("MatMul", ["b", "two.weight"], ["z"]),
    ]
    arrays = {"one.weight": matrix(64, 64, 17), "two.weight": matrix(64, 32, 18)}
    model = made(
        nodes,
        [value("x", FLOAT, ["n", 64])],
        [value("z", FLOAT, ["n", 32])],
        arrays,
        domains=["com.acme"],
    )
    return Wild(model, lambda seed: {"x": rows(seed)}, frozenset({"one", "two"}))


def functions() -> Wild:
    """A local function, called twice with weights of its callers."""
    body = helper.make_function(
        "own",
        "Dense",
        ["v", "w", "s"],
        ["out"],
        [
            node("MatMul", ["v", "w"], ["m"]),
            node("Add", ["m", "s"], ["t"]),
            node("Relu", ["t"], ["out"]),
        ],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        node("Dense", ["x", "one.weight", "one.bias"], ["a"], domain="own"),
        node("Dense", ["a", "two.weight", "two.bias"], ["z"], domain="own"),
    ]
    arrays = {
        "one.weight": matrix(64, 64, 19),
        "one.bias": np.linspace(-1, 1, 64).astype(np.float32),
        "two.weight": matrix(64, 32, 20),
        "two.bias": np.linspace(1, -1, 32).astype(np.float32),
    }
    model = made(
        nodes,
        [value("x", FLOAT, ["n", 64])],
        [value("z", FLOAT, ["n", 32])],
        arrays,
        domains=["own"],
        functions=[body],
    )
    return Wild(model, lambda seed: {"x": rows(seed)}, frozenset({"one", "two"}))


def several() -> Wild:
    """Inputs of several types and ranks, two dynamic axes, omitted arguments, two outputs."""
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("Where", ["mask", "e", "zero"], ["w"]),
        node("Mul", ["w", "gain"], ["g"]),
        node("Add", ["g", "extra"], ["s"]),
        node("MatMul", ["s", "one.weight"], ["a"]),
        node("Clip", ["a", "", "top"], ["c"]),
        node("MatMul", ["c", "two.weight"], ["z"]),
        node("ReduceMean", ["c"], ["mean"], axes=[1], keepdims=0),
    ]
    arrays = {
        "table": matrix(50, 64, 21),
        "one.weight": matrix(64, 64, 22),
        "two.weight": matrix(64, 32, 23),
        "zero": np.float32(0),
        "top": np.float32(1.5),
    }
    model = made(
        nodes,
        [
            value("ids", INT64, ["batch", "time"]),
            value("mask", BOOL, ["batch", "time", 1]),
            value("gain", FLOAT, []),
            value("extra", FLOAT, ["batch", "time", 64]),
        ],
        [value("z", FLOAT, ["batch", "time", 32]), value("mean", FLOAT, ["batch", 64])],
        {n: np.asarray(a) for n, a in arrays.items()},
    )

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        shape = (3, 4 + seed)
        return {
            "ids": rng.integers(0, 50, shape),
            "mask": rng.random((*shape, 1)) > 0.2,
            "gain": np.array(1.5, np.float32),
            "extra": rng.standard_normal((*shape, 64)).astype(np.float32),
        }

    return Wild(model, inputs, frozenset({"table", "one", "two"}))
