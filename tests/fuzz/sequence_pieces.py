"""Pieces of random networks that fit sequences and vectors."""

from __future__ import annotations

import numpy as np

from tests.fuzz.networks import TIME, TOKENS, Network, Piece, Value


def attention(net: Network, value: Value) -> None:
    time, width = value.shape
    heads = int(net.pick([1, 2]))
    groups = int(net.pick([g for g in (1, heads) if g]))
    size = int(net.pick([2, 3, 4]))

    def ints(*d):
        return net.constant(np.array([0, 0 if net.loose_time or net.chance(0.5) else time, *d]))

    def side(count: int, source: str) -> str:
        made = net.node("MatMul", [source, net.weight((width, count * size), width)])
        if net.chance(0.5):
            made = net.node("Add", [made, net.weight((count * size,))])
        if net.chance(0.15):
            made = net.node(net.pick(["Relu", "Tanh"]), [made])
        return made

    def parted(name: str, count: int, perm: list[int]) -> str:
        return net.node("Transpose", [net.node("Reshape", [name, ints(count, size)])], perm=perm)

    others = [
        v for v in net.open if v.shape[1:] == (width,) and len(v.shape) == 2 and v.shape[0] == time
    ]
    context = value.name if net.chance(0.7) else net.pick(others).name
    query = side(heads, value.name)
    key = side(groups, context)
    own = key if net.chance(0.2) else side(groups, context)
    if net.chance(0.3):
        query, key = (
            layer_normed(net, parted(n, c, [0, 2, 1, 3]), size)
            for n, c in ((query, heads), (key, groups))
        )
        key = net.node("Transpose", [key], perm=[0, 1, 3, 2])
    else:
        query, key = parted(query, heads, [0, 2, 1, 3]), parted(key, groups, [0, 2, 3, 1])
    mixed_of = parted(own, groups, [0, 2, 1, 3])
    if groups < heads and net.chance(0.5):
        order = net.constant(np.repeat(np.arange(groups), heads // groups))
        key = net.node("Gather", [key, order], axis=1)
        mixed_of = net.node("Gather", [mixed_of, order], axis=1)
    scores = net.node("Mul", [net.node("MatMul", [query, key]), net.constant(np.float32(0.5))])
    soft = net.node("Softmax", [scores], axis=-1)
    mixed = net.node("MatMul", [soft, mixed_of])
    back = net.node("Transpose", [mixed], perm=[0, 2, 1, 3])
    joined = net.node("Reshape", [back, net.constant(np.array([0, 0, heads * size]))])
    net.add(joined, (time, heads * size))
    made = net.node("MatMul", [joined, net.weight((heads * size, width), heads * size)])
    made = net.node("Add", [value.name, made]) if net.chance(0.6) else made
    net.add(made, value.shape)


def layer_normed(net: Network, name: str, size: int) -> str:
    if net.opset < 17:
        return name
    return net.node("LayerNormalization", [name, net.weight((size,), mean=1.0)], axis=-1)


def recurrent(net: Network, value: Value) -> None:
    time, width = value.shape
    kind, gates = net.pick([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    hidden = int(net.pick([3, 4]))
    two = bool(net.chance(0.3))
    sides = 2 if two else 1
    name = net.node("Transpose", [value.name], perm=[1, 0, 2])
    inputs = [
        name,
        net.weight((sides, gates * hidden, width), width),
        net.weight((sides, gates * hidden, hidden), hidden),
    ]
    inputs += [net.weight((sides, 2 * gates * hidden))] if net.chance(0.7) else []
    direction = "bidirectional" if two else "forward"
    made = net.node(kind, inputs, hidden_size=hidden, direction=direction)
    made = net.node("Transpose", [made], perm=[2, 0, 1, 3])
    net.add(
        net.node("Reshape", [made, net.constant(np.array([0, 0, sides * hidden]))]),
        (time, sides * hidden),
    )


def head(net: Network, value: Value) -> None:
    """A head that shares its weight with a table, where there is one."""
    width = value.shape[-1]
    tables = [w for w, a in net.weights.items() if a.shape == (TOKENS, width)]
    table = net.pick(tables) if tables else net.weight((TOKENS, width), width, True)
    weight = net.node("Transpose", [table], perm=[1, 0])
    net.add(net.node("MatMul", [value.name, weight]), (value.shape[0], TOKENS))


def pooled(net: Network, value: Value) -> None:
    op_type = net.pick(["ReduceMean", "ReduceSum", "ReduceMax"])
    if op_type == "ReduceSum" or net.opset >= 18:
        name = net.node(op_type, [value.name, net.constant(np.array([1]))], keepdims=0)
    else:
        name = net.node(op_type, [value.name], keepdims=0, axes=[1])
    net.add(name, (value.shape[1],))


def over_time(net: Network, value: Value) -> None:
    """A convolution along time, or a product with a weight on the left, as mixers have it."""
    time, width = value.shape
    if net.chance(0.5) and not net.loose_time:
        net.add(net.node("MatMul", [net.weight((time, time), time), value.name]), value.shape)
        return
    name = net.node("Transpose", [value.name], perm=[0, 2, 1])
    groups = int(net.pick([1, width]))
    name = net.node(
        "Conv",
        [name, net.weight((width, width // groups, 3), 3 * width // groups)],
        pads=[1, 1],
        group=groups,
    )
    net.add(net.node("Transpose", [name], perm=[0, 2, 1]), value.shape)


def bilinear(net: Network, value: Value) -> None:
    """Feed-forward layers with a gate, as decoders have them."""
    _time, width = value.shape
    up = net.node("MatMul", [value.name, net.weight((width, 6), width)])
    through = net.node("MatMul", [value.name, net.weight((width, 6), width)])
    kind = net.pick(["Sigmoid", "Relu", "Tanh", "silu"])
    act = (
        net.node("Mul", [through, net.node("Sigmoid", [through])])
        if kind == "silu"
        else net.node(kind, [through])
    )
    made = net.node("Mul", [up, act] if net.chance(0.5) else [act, up])
    made = net.node("MatMul", [made, net.weight((6, width), 6)])
    net.add(net.node("Add", [value.name, made]) if net.chance(0.7) else made, value.shape)


def gemm(net: Network, value: Value) -> None:
    (count,) = value.shape
    out = int(net.pick([count, 4, 6, 8])) if count <= 16 else 6
    if net.chance(0.6):
        weight, attributes = net.weight((out, count), count), {"transB": 1}
    else:
        weight, attributes = net.weight((count, out), count), {}
    if net.chance(0.2):
        attributes |= {"alpha": 0.5, "beta": 2.0}
    inputs = [value.name, weight]
    inputs += [net.weight(net.pick([(out,), (out,), (1, out), ()]))] if net.chance(0.7) else []
    net.add(net.node("Gemm", inputs, **attributes), (out,))


def folded(net: Network, value: Value) -> None:
    (count,) = value.shape
    if count % 2 == 0:
        parts = [2, count // 2] if net.chance(0.5) else [count // 2, 2]
        shape = net.constant(np.array([0 if net.chance(0.5) else -1, *parts]))
        name = net.node("Reshape", [value.name, shape])
        if parts[0] != TIME or not net.loose_time:
            net.add(name, tuple(parts))


PIECES: list[Piece] = [attention, bilinear] * 2 + [recurrent, head, pooled, over_time]
VECTORS: list[Piece] = [gemm] * 4 + [folded]
