"""Small classifiers as graphs: residual convolutions of random form, and one over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from compressor.graph.inference import infer_shapes
from compressor.graph.plain import clean
from compressor.models.onnx.carrier import OnnxCarrier

CLASSES = 3


class Builder:
    """Collects the nodes and initializers of a graph."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def add(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node; return its output."""
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def tensor(self, name: str, values: Any) -> str:
        """Add a constant."""
        self.tensors.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """Add a random weight."""
        scale = 1 / np.sqrt(np.prod(shape[1:]))
        return self.tensor(name, (scale * self.rng.normal(size=shape)).astype(np.float32))

    def conv(self, x: str, name: str, inputs: int, outputs: int, stride: int = 1) -> str:
        """Add a 3x3 convolution."""
        weight = self.weight(f"{name}.weight", outputs, inputs, 3, 3)
        attributes = {"pads": [1, 1, 1, 1], "strides": [stride, stride]}
        return self.add("Conv", [x, weight], f"{name}_out", **attributes)

    def carrier(self, inputs: dict[str, list[Any]], output: str, rank: int = 2) -> OnnxCarrier:
        """Return the model, cleaned as one that is read from a file."""
        ends: list[Any] = ["batch", CLASSES] if rank == 2 else ["batch"] * rank
        graph = helper.make_graph(
            self.nodes,
            "network",
            [
                helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s)
                for n, s in inputs.items()
            ],
            [helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, ends)],
            self.tensors,
        )
        opset = [helper.make_opsetid("", 21)]
        proto = helper.make_model(graph, opset_imports=opset, ir_version=10)
        onnx.checker.check_model(proto)
        model = ir.from_proto(proto)
        clean(model)
        infer_shapes(model)
        return OnnxCarrier(model)


def residual_network(seed: int, ending: str = "") -> OnnxCarrier:
    """Return a network of three blocks ``b1`` to ``b3``; sums reach over one block or two.

    Args:
        seed: of widths, strides, sums, and of how the batch's size is used at the end.
        ending: operator after the logits.
    """
    made = Builder(seed)
    width = int(made.rng.integers(2, 5))
    x = made.add("Relu", [made.conv("x", "stem", 2, width)], "x0")
    seen = [x]
    for block in (1, 2, 3):
        y = made.conv(x, f"b{block}.conv", width, width)
        if made.rng.random() < 0.8:  # what it adds may come from before the exit before it
            y = made.add("Add", [y, seen[int(made.rng.integers(len(seen)))]], f"sum{block}")
        if made.rng.random() < 0.8:
            y = made.add("Relu", [y], f"x{block}")
        x = y
        seen.append(x)
    axes = made.tensor("axes", np.array([2, 3], np.int64))
    mean = made.add("ReduceMean", [x, axes], "mean", keepdims=0)
    if made.rng.random() < 0.5:  # as exporters write a flattening: by the input's own shape
        count = made.add("Shape", ["x"], "count", start=0, end=1)
        rest = made.tensor("rest", np.array([width], np.int64))
        shape = made.add("Concat", [count, rest], "shape", axis=0)
        mean = made.add("Reshape", [mean, shape], "flat")
    bias = made.weight("fc.bias", CLASSES)
    weight = made.weight("fc.weight", CLASSES, width)
    output = made.add("Gemm", [mean, weight, bias], "logits", transB=1)
    if ending:
        output = made.add(ending, [output], "output", axis=-1)
    return made.carrier({"x": ["batch", 2, 6, 6]}, output)


def token_network() -> OnnxCarrier:
    """Return two attention blocks over ``[batch, tokens, 8]`` with a mask ``[batch, tokens]``.

    Blocks read the mask, the batch's size for their shapes, and a table that is made once from the
    number of tokens; that number, in the type of the products, divides these. The second block has
    samples and heads on one axis meanwhile.
    """
    made = Builder(5)
    width, heads = 8, 2
    tokens = made.add("Shape", ["x"], "tokens", start=1, end=2)
    zero = made.tensor("zero", np.array([0], np.int64))
    table = made.weight("positions", 32, width)
    places = made.add("Slice", [table, zero, tokens, zero], "places")
    x = made.add("Add", ["x", places], "x0")
    batch = made.add("Shape", ["x"], "batch", start=0, end=1)
    ends = made.tensor("ends", np.array([heads, width // heads], np.int64))
    split = made.add("Concat", [batch, tokens, ends], "split", axis=0)
    many = made.tensor("many", np.array([-1], np.int64))
    count = made.tensor("heads", np.array([heads], np.int64))
    deep = made.tensor("deep", np.array([width // heads], np.int64))
    split_heads = made.add("Concat", [batch, count, tokens, deep], "split_heads", axis=0)
    whole = made.tensor("whole", np.array([0, 0, width], np.int64))
    axes = made.tensor("mask_axes", np.array([1, 2], np.int64))
    mask = made.add("Unsqueeze", ["mask", axes], "wide_mask")
    length = made.add("Cast", [tokens], "length", to=onnx.TensorProto.FLOAT)
    for block in (1, 2):
        sides = []
        for name in "qkv":
            weight = made.weight(f"b{block}.{name}.weight", width, width)
            flat = made.add("MatMul", [x, weight], f"{name}{block}")
            apart = made.add("Reshape", [flat, split], f"{name}{block}_apart")
            perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
            sides.append(made.add("Transpose", [apart], f"{name}{block}_heads", perm=perm))
        dot = made.add("MatMul", sides[:2], f"dot{block}")
        root = made.add("CastLike", [length, dot], f"root{block}")
        score = made.add("Add", [made.add("Div", [dot, root], f"scaled{block}"), mask], f"s{block}")
        share = made.add("Softmax", [score], f"p{block}", axis=-1)
        if block == 2:
            lengths = [(share, tokens), (sides[2], deep)]
            shapes = [
                made.add("Concat", [many, tokens, n], f"{v}_flat", axis=0) for v, n in lengths
            ]
            merged = [
                made.add("Reshape", [v, shape], f"{v}_merged")
                for (v, _), shape in zip(lengths, shapes, strict=True)
            ]
            mixed = made.add("MatMul", merged, "mixed_merged")
            mixed = made.add("Reshape", [mixed, split_heads], "mixed2")
        else:
            mixed = made.add("MatMul", [share, sides[2]], f"mixed{block}")
        back = made.add("Transpose", [mixed], f"back{block}", perm=[0, 2, 1, 3])
        joined = made.add("Reshape", [back, whole], f"joined{block}")
        out = made.weight(f"b{block}.out.weight", width, width)
        x = made.add("Add", [x, made.add("MatMul", [joined, out], f"out{block}")], f"x{block}")
    one = made.tensor("one", np.array([1], np.int64))
    mean = made.add("ReduceMean", [x, one], "mean", keepdims=0)
    weight = made.weight("fc.weight", CLASSES, width)
    output = made.add("Gemm", [mean, weight], "logits", transB=1)
    return made.carrier({"x": ["batch", "t", width], "mask": ["batch", "t"]}, output)


def crossing_network(kind: str) -> OnnxCarrier:
    """Return a network in which something after the first block is not each sample's own.

    Args:
        kind: ``maximum`` of the whole batch, read before and after; ``later maximum`` read after
            only; ``merged`` samples and channels on one axis; ``running sum`` over samples.
    """
    made = Builder(3)
    shape = made.tensor("merge", np.array([-1, 6, 6], np.int64))
    apart = made.tensor("apart", np.array([-1, 2, 6, 6], np.int64))
    flat = made.add("Reshape", ["x", shape], "merged") if kind == "merged" else ""
    first = made.add("Reshape", [flat, apart], "back") if flat else "x"
    x = made.conv(first, "b1.conv", 2, 4)
    if "maximum" in kind:
        largest = made.add("ReduceMax", ["x"], "largest", keepdims=0)
        x = made.add("Div", [x, largest], "scaled") if kind == "maximum" else x
    x = made.add("Relu", [x], "x1")
    y = made.conv(x, "b2.conv", 4, 4)
    if "maximum" in kind:
        y = made.add("Div", [y, "largest"], "divided")
    elif kind == "running sum":
        y = made.add("CumSum", [y, made.tensor("first", np.array(0, np.int64))], "summed")
    else:
        again = made.add("Reshape", [flat, apart], "again")
        y = made.add("Add", [y, made.conv(again, "side", 2, 4)], "sum")
    axes = made.tensor("axes", np.array([2, 3], np.int64))
    mean = made.add("ReduceMean", [y, axes], "mean", keepdims=0)
    output = made.add("Gemm", [mean, made.weight("fc.weight", CLASSES, 4)], "logits", transB=1)
    return made.carrier({"x": ["batch", 2, 6, 6]}, output)
