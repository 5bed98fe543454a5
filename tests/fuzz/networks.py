"""Random small networks as ONNX files: layers read twice, gates, streams, bodies, attention.

A network is known by its seed and its number of pieces. Every choice comes from one generator.
Images are ``[batch, channels, height, width]``, sequences ``[batch, time, channels]``, and vectors
``[batch, channels]``. The batch is dynamic, and so is time in a half of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compressor.types.tensors import Array, Batch

TIME = 5
TOKENS = 7


@dataclass(frozen=True)
class Value:
    """A value of the network and its shape behind the batch."""

    name: str
    shape: tuple[int, ...]


class Network:
    """Grows a network from its input.

    Args:
        seed: decides all.
        count: how many pieces are added before the outputs.
        pieces: what can be added, by the number of axes behind the batch, and to ``any``.
    """

    def __init__(self, seed: int, count: int, pieces: Mapping[Any, Sequence[Piece]]):
        self.random = np.random.default_rng(seed)
        self.opset = int(self.random.integers(13, 24))
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self.pool: dict[tuple[object, ...], list[str]] = {}
        self.count = 0
        self.kind = str(
            self.random.choice(["image", "image", "sequence", "sequence", "tokens", "vector"])
        )
        self.loose_time = bool(self.random.random() < 0.5)
        width = int(self.random.choice([4, 6, 8]))
        self.shapes = {
            "image": (3, 6, 6),
            "sequence": (TIME, width),
            "tokens": (TIME,),
            "vector": (width,),
        }[self.kind]
        start = Value("x", self.shapes)
        self.open = [start]
        if self.kind == "tokens":
            table = self.weight((TOKENS, width), 1, True)
            self.open = [Value(self.node("Gather", [table, "x"]), (TIME, width))]
        for _ in range(count):
            self._grow(pieces)

    # ------------------------------------------------------------------ parts

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def weight(
        self, shape: tuple[int, ...], fan: int = 1, plain: bool = False, mean: float = 0.0
    ) -> str:
        """Return a parameter: a new one, or one of the shape that something else reads already."""
        key = ("w", shape, mean)
        if self.pool.get(key) and self.chance(0.25):
            return str(self.pick(self.pool[key]))
        array = self.random.standard_normal(shape) / np.sqrt(max(fan, 1)) + mean
        for axis, length in enumerate(shape):
            if length > 1 and mean == 0.0 and self.chance(0.4):
                form = [1] * len(shape)
                form[axis] = length
                array = array * 2 ** self.random.uniform(-3, 3, length).reshape(form)
            if length > 2 and self.chance(0.05):
                np.moveaxis(array, axis, 0)[int(self.random.integers(length))] = 0
        name = f"w{len(self.weights)}"
        self.weights[name] = array.astype(np.float32)
        made = name
        if not plain and self.chance(0.08):
            made = self.node("Identity", [name])
        elif not plain and self.chance(0.08):
            made = self.node("Mul", [name, self.constant(np.float32(0.5))])
        if not plain:
            self.pool.setdefault(key, []).append(made)
        return made

    def constant(self, array: Any) -> str:
        """Add numbers: as an initializer, or by a node."""
        array = np.asarray(array)
        if self.chance(0.5):
            name = f"c{len(self.weights)}"
            self.weights[name] = array
            return name
        tensor = numpy_helper.from_array(array)
        return self.node("Constant", [], value=tensor)

    def node(self, op_type: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> Any:
        """Add a node, and return its outputs' names."""
        self.count += 1
        names = [f"v{self.count}" + ("" if i == 0 else f"_{i}") for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, f"n{self.count}", **attributes))
        return names[0] if outputs == 1 else names

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        self.open.append(Value(name, shape))

    def channels(self, value: Value) -> tuple[int, int]:
        """Return the axis of channels, batch counted, and how many there are."""
        axis = 1 if len(value.shape) in (1, 3) else 2
        return axis, value.shape[axis - 1]

    def along(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a constant with one element a channel."""
        _axis, count = self.channels(value)
        return (count, 1, 1) if len(value.shape) == 3 else (count,)

    def _grow(self, pieces: Mapping[Any, Sequence[Piece]]) -> None:
        """Add one random piece behind a random value."""
        late = self.open[-3:] if self.chance(0.7) else self.open
        value = self.pick(late)
        piece = self.pick([*pieces["any"] * 2, *pieces[len(value.shape)] * 3])
        piece(self, value)

    # ------------------------------------------------------------------ files

    def model(self) -> onnx.ModelProto:
        """Return the network; its outputs are the last value and some earlier ones."""
        outputs = [self.open[-1]]
        outputs += [v for v in self.open[1:-1] if self.chance(0.12)]
        extra = [w for w in self.weights if w.startswith("w")]
        given = []
        if self.chance(0.15):
            name = self.pick(extra) if extra else None
            if name:
                given = [(self.node("Identity", [name]), self.weights[name].shape)]
        floats = TensorProto.FLOAT
        element = TensorProto.INT64 if self.kind == "tokens" else floats
        shape: list[Any] = ["batch", *self.shapes]
        if self.kind in ("sequence", "tokens") and self.loose_time:
            shape[1] = "time"
        ends = []
        for value in dict.fromkeys(outputs):
            name = value.name
            if name == "x":
                name = self.node("Identity", ["x"])
            ends.append(
                helper.make_tensor_value_info(name, floats, [None] * (len(value.shape) + 1))
            )
        ends += [helper.make_tensor_value_info(n, floats, s) for n, s in given]
        tensors = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        inputs = [helper.make_tensor_value_info("x", element, shape)]
        if self.chance(0.15):
            inputs += [
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                for tensor in tensors
                if self.chance(0.5)
            ]
        graph = helper.make_graph(self.nodes, "random", inputs, ends, tensors)
        ids = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=ids, ir_version=8)

    def batch(self, seed: int, size: int = 4) -> Batch:
        """Return random inputs."""
        random = np.random.default_rng(seed)
        if self.kind == "tokens":
            return {"x": random.integers(0, TOKENS, (size, TIME))}
        return {"x": random.standard_normal((size, *self.shapes)).astype(np.float32)}


Piece = Callable[[Network, Value], None]
