"""Random convolutional networks as ONNX graphs: branches, sums, concatenations, groups."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compressor.graph.inference import infer_shapes
from compressor.models.onnx.carrier import OnnxCarrier
from compressor.types.tensors import Array

_SIZE = 6


class Builder:
    """Grows a network from its input; every choice comes from one random generator."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        shape = ir.Shape(["batch", 3, _SIZE, _SIZE])
        self.image = ir.Value(name="image", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        self.graph = ir.Graph([self.image], [], nodes=[], opset_imports={"": 21}, name="random")
        self.open = [(self.image, 3)]
        self.count = 0

    def weight(self, *shape: int, positive: bool = False) -> ir.Value:
        """Add a parameter with random values."""
        array: Array = self.random.standard_normal(shape).astype(np.float32)
        array = np.abs(array) + np.float32(0.5) if positive else array
        value = ir.Value(name=f"w{len(self.graph.initializers)}", const_value=ir.tensor(array))
        value.shape, value.type = ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        self.graph.register_initializer(value)
        return value

    def constant(self, values: list[int]) -> ir.Value:
        """Add integers."""
        value = ir.Value(
            name=f"c{len(self.graph.initializers)}", const_value=ir.tensor(np.array(values))
        )
        value.shape, value.type = ir.Shape([len(values)]), ir.TensorType(ir.DataType.INT64)
        self.graph.register_initializer(value)
        return value

    def node(self, op_type: str, inputs: list[ir.Value], attributes: object = None) -> ir.Value:
        """Add a node."""
        self.count += 1
        out = ir.Value(name=f"v{self.count}", type=ir.TensorType(ir.DataType.FLOAT))
        given = attributes if isinstance(attributes, dict) else {}
        self.graph.append(ir.node(op_type, inputs, given, outputs=[out], name=f"n{self.count}"))
        return out

    def conv(self, value: ir.Value, channels: int, out: int, groups: int = 1) -> ir.Value:
        """Add a convolution that keeps the size, with a bias half of the time."""
        weights = [self.weight(out, channels // groups, 3, 3)]
        weights += [self.weight(out)] if self.random.random() < 0.5 else []
        return self.node("Conv", [value, *weights], {"pads": [1, 1, 1, 1], "group": groups})

    def grow(self) -> None:
        """Add one random piece behind a random value."""
        value, channels = self.open[self.random.integers(len(self.open))]
        kind = self.random.choice(["conv", "conv", "norm", "relu", "sum", "concat", "depthwise"])
        if kind == "conv":
            out = int(self.random.integers(2, 7))
            self.open.append((self.conv(value, channels, out), out))
        elif kind == "norm":
            sides = [self.weight(channels) for _ in range(3)]
            made = [value, *sides, self.weight(channels, positive=True)]
            self.open.append((self.node("BatchNormalization", made), channels))
        elif kind == "relu":
            op_type = str(self.random.choice(["Relu", "Sigmoid", "Tanh", "HardSwish"]))
            self.open.append((self.node(op_type, [value]), channels))
        elif kind == "depthwise":
            self.open.append((self.conv(value, channels, channels, channels), channels))
        else:
            self.join(kind, value, channels)

    def join(self, kind: str, value: ir.Value, channels: int) -> None:
        """Add or concatenate two values."""
        other, others = self.open[self.random.integers(len(self.open))]
        if kind == "concat":
            joined = self.node("Concat", [value, other], {"axis": 1})
            self.open.append((joined, channels + others))
            return
        if others != channels:
            other = self.conv(other, others, channels)
        op_type = str(self.random.choice(["Add", "Mul"]))
        self.open.append((self.node(op_type, [value, other]), channels))

    def carrier(self) -> OnnxCarrier:
        """Finish with a pooled or a flattened head."""
        value, channels = self.open[-1]
        if self.random.random() < 0.5:
            value = self.node("ReduceMean", [value, self.constant([2, 3])], {"keepdims": 0})
            wide = channels
        else:
            value, wide = self.node("Flatten", [value], {"axis": 1}), channels * _SIZE * _SIZE
        head = [value, self.weight(4, wide), self.weight(4)]
        self.graph.outputs.append(self.node("Gemm", head, {"transB": 1}))
        model = ir.Model(self.graph, ir_version=10)
        infer_shapes(model)
        return OnnxCarrier(model)


def random_network(seed: int, pieces: int) -> OnnxCarrier:
    """Return a network of a convolution, so many random pieces, and a head."""
    builder = Builder(seed)
    builder.open = [(builder.conv(builder.image, 3, 6), 6)]
    for _ in range(pieces):
        builder.grow()
    return builder.carrier()
