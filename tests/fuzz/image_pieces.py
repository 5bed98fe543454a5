"""Pieces of random networks that fit images."""

from __future__ import annotations

import numpy as np

from tests.fuzz.networks import TIME, Network, Piece, Value


def conv(net: Network, value: Value) -> None:
    channels, *size = value.shape
    out = int(net.pick([channels, 4, 6, 8]))
    divisors = [g for g in (1, 1, 1, 2, 3, channels) if channels % g == 0 and out % g == 0]
    if net.chance(0.2):
        groups = channels
        out = channels * int(net.pick([1, 1, 2]))
    else:
        groups = int(net.pick(divisors))
    kernel = int(net.pick([1, 1, 3]))
    inputs = [
        value.name,
        net.weight((out, channels // groups, kernel, kernel), channels // groups * kernel**2),
    ]
    inputs += [net.weight((out,))] if net.chance(0.6) else []
    pads = [kernel // 2] * 4
    net.add(net.node("Conv", inputs, pads=pads, group=groups), (out, *size))


def transposed(net: Network, value: Value) -> None:
    channels, *size = value.shape
    groups = int(net.pick([g for g in (1, 1, 2, channels) if channels % g == 0]))
    each = int(net.pick([1, 2, 3]))
    inputs = [value.name, net.weight((channels, each, 3, 3), channels * 9)]
    inputs += [net.weight((each * groups,))] if net.chance(0.5) else []
    net.add(net.node("ConvTranspose", inputs, pads=[1] * 4, group=groups), (each * groups, *size))


def batch_norm(net: Network, value: Value) -> None:
    count = value.shape[0]
    inputs = [
        value.name,
        net.weight((count,), mean=1.0),
        net.weight((count,)),
        net.weight((count,)),
    ]
    variance = net.random.uniform(0.3, 2, count).astype(np.float32)
    net.weights[f"w{len(net.weights)}"] = variance
    inputs.append(f"w{len(net.weights) - 1}")
    net.add(net.node("BatchNormalization", inputs), value.shape)


def other_norm(net: Network, value: Value) -> None:
    count = value.shape[0]
    if net.opset >= 21 and count % 2 == 0 and net.chance(0.5):
        sides = [net.weight((count,), mean=1.0), net.weight((count,))]
        net.add(net.node("GroupNormalization", [value.name, *sides], num_groups=2), value.shape)
        return
    sides = [net.weight((count,), mean=1.0), net.weight((count,))]
    if net.chance(0.2):
        net.add(net.node("LRN", [value.name], size=3), value.shape)
        return
    if min(value.shape[1:]) < 2:
        return
    net.add(net.node("InstanceNormalization", [value.name, *sides]), value.shape)


def pool(net: Network, value: Value) -> None:
    channels, height, width = value.shape
    op_type = net.pick(["MaxPool", "AveragePool", "AveragePool", "LpPool"])
    if min(height, width) < 3:
        return
    stride = int(net.pick([1, 2]))
    more = {"count_include_pad": int(net.pick([0, 1]))} if op_type == "AveragePool" else {}
    name = net.node(
        op_type, [value.name], kernel_shape=[3, 3], pads=[1] * 4, strides=[stride] * 2, **more
    )
    net.add(name, (channels, (height - 1) // stride + 1, (width - 1) // stride + 1))


def pad(net: Network, value: Value) -> None:
    channels, height, width = value.shape
    mode = net.pick(["constant", "constant", "reflect", "edge"])
    deep = mode == "constant" and net.chance(0.3)
    if (mode == "reflect" and min(height, width) < 2) or height > 8:
        return
    amounts = [0, 1 if deep else 0, 0, 1, 0, 0, 1, 0]
    inputs = [value.name, net.constant(np.array(amounts))]
    if mode == "constant" and net.chance(0.6):
        inputs.append(net.constant(np.float32(net.pick([0.0, 0.7]))))
    shape = (channels + int(deep), height + 1, width + 1)
    net.add(net.node("Pad", inputs, mode=mode), shape)


def gate(net: Network, value: Value) -> None:
    """Squeeze and excite, or a gain computed for each channel, place or sample."""
    channels = value.shape[0]
    kind = net.pick(["se", "place", "pool", "add"])
    axes = [1] if kind == "place" else [2, 3]
    if net.opset >= 18:
        mean = net.node("ReduceMean", [value.name, net.constant(np.array(axes))], keepdims=1)
    else:
        mean = net.node("ReduceMean", [value.name], keepdims=1, axes=axes)
    if kind == "se":
        hidden = net.node(
            "Conv", [mean, net.weight((4, channels, 1, 1), channels), net.weight((4,))]
        )
        hidden = net.node("Relu", [hidden])
        mean = net.node(
            "Conv", [hidden, net.weight((channels, 4, 1, 1), 4), net.weight((channels,))]
        )
    if kind != "add" and net.chance(0.7):
        mean = net.node(net.pick(["Sigmoid", "HardSigmoid", "Relu"]), [mean])
    sides = [value.name, mean]
    if net.chance(0.5):
        sides.reverse()
    net.add(net.node("Add" if kind == "add" else "Mul", sides), value.shape)


def shuffle(net: Network, value: Value) -> None:
    channels, height, width = value.shape
    if channels % 2:
        return

    def shape(*d):
        return net.constant(np.array([0, *d]))

    if net.chance(0.3) and channels % 4 == 0:
        name = net.node("DepthToSpace", [value.name], blocksize=2, mode=net.pick(["DCR", "CRD"]))
        net.add(name, (channels // 4, height * 2, width * 2))
        return
    name = net.node("Reshape", [value.name, shape(2, channels // 2, height, width)])
    name = net.node("Transpose", [name], perm=[0, 2, 1, 3, 4])
    net.add(net.node("Reshape", [name, shape(channels, height, width)]), value.shape)


def resize(net: Network, value: Value) -> None:
    channels, height, width = value.shape
    if height > 6:
        return
    if net.opset >= 16 and net.chance(0.4):
        others = [
            v for v in net.open if len(v.shape) == 3 and v.shape[0] >= 2 and min(v.shape[1:]) > 1
        ]
        if others:
            other = net.pick(others)
            starts = [net.constant(np.array(i)) for i in ([0], [2], [1])]
            name = net.node("Slice", [other.name, *starts])
            grid = net.node(
                "Transpose",
                [net.node("Tanh", [name]) if net.chance(0.5) else name],
                perm=[0, 2, 3, 1],
            )
            net.add(
                net.node("GridSample", [value.name, grid], padding_mode="border"),
                (channels, *other.shape[1:]),
            )
        return
    sizes = net.constant(np.array([1, 1, 2, 2], np.float32))
    mode = net.pick(["nearest", "linear"])
    net.add(
        net.node("Resize", [value.name, "", sizes], mode=mode), (channels, height * 2, width * 2)
    )


def flatten(net: Network, value: Value) -> None:
    kind = net.pick(["flatten", "mean", "sequence", "global"])
    channels, height, width = value.shape
    if kind == "flatten" and channels * height * width <= 300:
        net.add(net.node("Flatten", [value.name], axis=1), (channels * height * width,))
    elif kind == "sequence" and height * width != TIME:
        name = net.node(
            "Reshape", [value.name, net.constant(np.array([0, channels, height * width]))]
        )
        net.add(net.node("Transpose", [name], perm=[0, 2, 1]), (height * width, channels))
    else:
        name = net.node("GlobalAveragePool" if kind != "global" else "GlobalMaxPool", [value.name])
        net.add(net.node("Flatten", [name], axis=1), (channels,))


def per_place(net: Network, value: Value) -> None:
    """A layer on each place's channels, as ConvNeXt has it."""
    channels, height, width = value.shape
    name = net.node("Transpose", [value.name], perm=[0, 2, 3, 1])
    made = net.node("MatMul", [name, net.weight((channels, 6), channels)])
    made = net.node("Add", [made, net.weight((6,))])
    made = net.node(net.pick(["Relu", "Tanh", "Relu"]), [made])
    net.add(net.node("Transpose", [made], perm=[0, 3, 1, 2]), (6, height, width))


PIECES: list[Piece] = [conv] * 5 + [batch_norm, gate] * 2
PIECES += [transposed, other_norm, pool, pad, shuffle, resize, flatten, per_place]
