"""Pieces of random networks that fit values of any rank, and the table of all."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz import image_pieces as images
from tests.fuzz import sequence_pieces as sequences
from tests.fuzz.networks import Network, Piece, Value


def activation(net: Network, value: Value) -> None:
    plain = ["Relu"] * 6 + [
        "LeakyRelu",
        "Sigmoid",
        "Tanh",
        "HardSigmoid",
        "Elu",
        "Selu",
        "Softplus",
        "Abs",
        "Neg",
        "Identity",
        "Softsign",
        "Celu",
        "ThresholdedRelu",
    ]
    if net.opset >= 14:
        plain.append("HardSwish")
    if net.opset >= 18:
        plain.append("Mish")
    if net.opset >= 20:
        plain += ["Gelu"] * 2
    kind = net.pick(
        [
            *plain,
            "clip",
            "clip6",
            "prelu",
            "prelu1",
            "preluc",
            "sqrt",
            "square",
            "erf",
            "dropout",
            "silu",
            "max0",
            "where",
        ]
    )
    x = value.name
    f32 = np.float32
    match kind:
        case "clip":
            made = net.node("Clip", [x, net.constant(f32(0))])
        case "clip6":
            made = net.node("Clip", [x, net.constant(f32(0)), net.constant(f32(6))])
        case "prelu":
            made = net.node("PRelu", [x, net.weight(net.along(value))])
        case "prelu1":
            made = net.node("PRelu", [x, net.constant(f32([0.2]))])
        case "preluc":
            others = [v for v in net.open if v.shape == value.shape]
            made = net.node("PRelu", [x, net.pick(others).name])
        case "sqrt":
            made = net.node("Sqrt", [net.node("Abs", [x])])
        case "square":
            made = net.node("Mul", [x, x])
        case "erf":
            made = net.node("Mul", [x, net.node("Erf", [x])])
        case "silu":
            made = net.node("Mul", [x, net.node("Sigmoid", [x])])
        case "dropout":
            made = net.node("Dropout", [x])
        case "max0":
            made = net.node("Max", [net.constant(f32(0)), x])
        case "where":
            others = [v for v in net.open if v.shape == value.shape]
            sign = net.node("Greater", [x, net.constant(f32(0))])
            made = net.node("Where", [sign, x, net.pick(others).name])
        case _:
            made = net.node(kind, [x])
    net.add(made, value.shape)


def with_constant(net: Network, value: Value) -> None:
    op_type = net.pick(["Add", "Add", "Mul", "Mul", "Sub", "Div", "Max", "Min"])
    shapes = [net.along(value), net.along(value), (1,), (), value.shape, (1, *value.shape)]
    if net.loose_time and len(value.shape) == 2:
        shapes = shapes[:4]
    if len(value.shape) == 3:
        shapes += [(1, *value.shape[1:]), (1, value.shape[0], 1, 1)]
    if len(value.shape) == 2 and not net.loose_time:
        shapes += [(value.shape[0], 1)]
    shape = net.pick(shapes)
    constant = net.weight(shape, mean=2.0 if op_type == "Div" else 0.0)
    sides = [value.name, constant]
    if op_type == "Div":
        sides[1] = (
            net.node("Add", [net.node("Abs", [constant]), net.constant(np.float32(0.5))])
            if net.chance(0.5)
            else constant
        )
        if sides[1] == constant:
            base = net.weights.get(constant)
            if base is None or np.abs(base).min() < 0.1:
                sides[1] = net.constant(np.float32(1.7))
    if op_type in ("Add", "Mul", "Sub", "Max", "Min") and net.chance(0.3):
        sides.reverse()
    net.add(net.node(op_type, sides), value.shape)


def join(net: Network, value: Value) -> None:
    others = [v for v in net.open if v.shape == value.shape]
    op_type = net.pick(["Add", "Add", "Add", "Sub", "Mul", "Max", "Sum", "Mean", "Min"])
    sides = [value.name, net.pick(others).name]
    if op_type in ("Max", "Sum", "Mean") and net.chance(0.5):
        sides.append(net.pick(others).name)
    net.add(net.node(op_type, sides), value.shape)


def concat(net: Network, value: Value) -> None:
    axis, count = net.channels(value)

    def rest(v):
        return v.shape[: axis - 1] + v.shape[axis:]

    others = [v for v in net.open if len(v.shape) == len(value.shape) and rest(v) == rest(value)]
    others = [v for v in others if net.channels(v)[1] + count <= 24]
    if not others:
        return
    other = net.pick(others)
    total = count + net.channels(other)[1]
    shape = (*value.shape[: axis - 1], total, *value.shape[axis:])
    net.add(
        net.node(
            "Concat", [value.name, other.name], axis=net.pick([axis, axis - len(value.shape) - 1])
        ),
        shape,
    )


def split(net: Network, value: Value) -> None:
    axis, count = net.channels(value)
    if count < 2:
        return
    first = int(net.random.integers(1, count))
    sizes = [first, count - first]
    parts = net.node("Split", [value.name, net.constant(np.array(sizes))], 2, axis=axis)
    for name, size in zip(parts, sizes, strict=True):
        net.add(name, (*value.shape[: axis - 1], size, *value.shape[axis:]))
    if sizes[0] == sizes[1] and net.chance(0.7):
        second = net.node(net.pick(["Sigmoid", "Tanh", "Relu"]), [parts[1]])
        shape = (*value.shape[: axis - 1], first, *value.shape[axis:])
        net.add(net.node(net.pick(["Mul", "Add"]), [parts[0], second]), shape)


def cut(net: Network, value: Value) -> None:
    axis = int(net.random.integers(1, len(value.shape) + 1))
    length = value.shape[axis - 1]
    if length < 2 or (axis == 1 and len(value.shape) == 2 and net.loose_time):
        return
    start, step = int(net.random.integers(0, 2)), net.pick([1, 1, 2])
    ints = [net.constant(np.array([i])) for i in (start, length, axis, step)]
    size = len(range(start, length, step))
    shape = (*value.shape[: axis - 1], size, *value.shape[axis:])
    net.add(net.node("Slice", [value.name, *ints]), shape)


def gathered(net: Network, value: Value) -> None:
    axis, count = net.channels(value)
    order = (
        net.random.permutation(count) if net.chance(0.6) else net.random.integers(0, count, count)
    )
    net.add(net.node("Gather", [value.name, net.constant(order)], axis=axis), value.shape)


def reversed_order(net: Network, value: Value) -> None:
    """There and back again, with something in between."""
    perm = [0, 3, 1, 2] if len(value.shape) == 3 else [0, 2, 1]
    if len(value.shape) == 1:
        name = net.node("Unsqueeze", [value.name, net.constant(np.array([2]))])
        name = net.node(net.pick(["Relu", "Tanh", "Identity"]), [name])
        net.add(net.node("Squeeze", [name, net.constant(np.array([2]))]), value.shape)
        return
    name = net.node("Transpose", [value.name], perm=perm)
    name = net.node(net.pick(["Relu", "Sigmoid", "Identity", "Softmax"]), [name])
    net.add(net.node("Transpose", [name], perm=[int(i) for i in np.argsort(perm)]), value.shape)


def soft(net: Network, value: Value) -> None:
    net.add(
        net.node(net.pick(["Softmax", "LogSoftmax"]), [value.name], axis=net.channels(value)[0]),
        value.shape,
    )


def layer_norm(net: Network, value: Value) -> None:
    length = value.shape[-1]
    if net.opset >= 17 and net.chance(0.6):
        inputs = [value.name, net.weight((length,), mean=1.0)]
        inputs += [net.weight((length,))] if net.chance(0.7) else []
        net.add(net.node("LayerNormalization", inputs, axis=-1), value.shape)
        return
    if net.opset >= 23 and net.chance(0.5):
        net.add(
            net.node("RMSNormalization", [value.name, net.weight((length,), mean=1.0)]), value.shape
        )
        return
    square = net.node("Mul", [value.name, value.name])
    axes = {} if net.opset >= 18 else {"axes": [-1]}
    more = [net.constant(np.array([-1]))] if net.opset >= 18 else []
    mean = net.node("ReduceMean", [square, *more], keepdims=1, **axes)
    root = net.node("Sqrt", [net.node("Add", [mean, net.constant(np.float32(1e-3))])])
    made = net.node("Div", [value.name, root])
    sides = [made, net.weight((length,), mean=1.0)]
    if net.chance(0.3):
        sides.reverse()
    net.add(net.node("Mul", sides), value.shape)


def branch(net: Network, value: Value) -> None:
    """If, with layers in its branches that read outer weights; or a loop over a product."""
    count = value.shape[-1]
    weight, bias = net.weight((count, count), count), net.weight((count,))
    n = net.count = net.count + 1
    make = helper.make_node

    def out(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)

    if net.chance(0.5):
        axes = {"axes": list(range(len(value.shape) + 1))} if net.opset < 18 else {}
        mean = net.node("ReduceMean", [value.name], keepdims=0, **axes)
        condition = net.node("Greater", [mean, net.constant(np.float32(-1e9))])
        first = helper.make_graph(
            [make("MatMul", [value.name, weight], [f"t{n}"])], "then", [], [out(f"t{n}")]
        )
        inner = [make("Add", [value.name, bias], [f"e{n}"])]
        second = helper.make_graph(inner, "else", [], [out(f"e{n}")])
        made = net.node("If", [condition], then_branch=first, else_branch=second)
    else:
        inside = [
            make("MatMul", [f"s{n}", weight], [f"p{n}"]),
            make("Tanh", [f"p{n}"], [f"o{n}"]),
            make("Identity", [f"c{n}"], [f"k{n}"]),
        ]
        info = helper.make_tensor_value_info
        inputs = [
            info(f"i{n}", TensorProto.INT64, []),
            info(f"c{n}", TensorProto.BOOL, []),
            out(f"s{n}"),
        ]
        body = helper.make_graph(
            inside, "body", inputs, [info(f"k{n}", TensorProto.BOOL, []), out(f"o{n}")]
        )
        made = net.node(
            "Loop", [net.constant(np.int64(2)), net.constant(np.bool_(True)), value.name], body=body
        )
    net.add(made, value.shape)


def product(net: Network, value: Value) -> None:
    """A product along the last axis, with a weight on the right, which may be read elsewhere."""
    count = value.shape[-1]
    out = int(net.pick([count, count, 4, 6, 8, 1]))
    if net.chance(0.25):
        weight = net.node("Transpose", [net.weight((out, count), count)], perm=[1, 0])
    else:
        weight = net.weight((count, out), count)
    made = net.node("MatMul", [value.name, weight])
    if net.chance(0.6):
        sides = [made, net.weight((out,))]
        if net.chance(0.3):
            sides.reverse()
        made = net.node("Add", sides)
    net.add(made, (*value.shape[:-1], out))


PIECES: dict[object, list[Piece]] = {
    "any": [activation] * 3
    + [with_constant, join, product] * 2
    + [concat, split, cut, gathered, reversed_order, soft, layer_norm, branch],
    3: images.PIECES,
    2: [*sequences.PIECES, product, product, layer_norm, layer_norm],
    1: sequences.VECTORS,
}
