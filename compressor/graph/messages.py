"""What an ONNX message refers to, and how much it becomes, looked at before it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

import onnx
from google.protobuf.message import Message

_MOST_NODES = 20_000  # that functions may become, however small the file
_GROWTH = 10  # times the nodes of the file that they may always become
_MOST_NAMED = 100_000_000  # squares of how often each name comes: about eight seconds
_DEEPEST = 200  # functions that call each other in a row

Call = tuple[str, str]


def tensors_in(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield every tensor anywhere in a message, in its order: also in functions and attributes.

    Fields are followed by their types, whatever they are called and whatever an attribute claims
    to hold, so none is overlooked.
    """
    waiting = [message]
    while waiting:
        current = waiting.pop()
        if isinstance(current, onnx.TensorProto):
            yield current
        elif not isinstance(current, onnx.ValueInfoProto | onnx.TypeProto):
            inner: list[Message] = []
            for field, value in current.ListFields():
                if field.message_type is not None:
                    inner.extend([value] if isinstance(value, Message) else value)
            waiting.extend(reversed(inner))


def cyclic_function(proto: onnx.ModelProto) -> str:
    """Return the name of a function that calls itself, perhaps through others; empty if none."""
    try:
        TopologicalSorter({call: set(made) for call, made in _calls(proto).items()}).prepare()
    except CycleError as error:
        return str(error.args[1][0][1])
    return ""


def expansion(proto: onnx.ModelProto) -> str:
    """Return why a model's functions cannot be inlined in bounds; empty if they can.

    A function that calls the next one twice doubles with each: 26 of them in two kilobytes become
    33 million nodes. Names are what takes longest: the library makes each unique by counting up
    from one. No function may call itself.
    """
    calls, bodies = _calls(proto), _bodies(proto)
    top = _counted(_nodes(proto.graph.node))
    order = TopologicalSorter({call: made.keys() & calls.keys() for call, made in calls.items()})
    copies, names = Counter(top), Counter[str]()
    depth = dict.fromkeys(top, 1)
    total = sum(count for call, count in top.items() if call not in calls)
    for call in reversed(tuple(order.static_order())):  # callers first
        times = copies[call]
        for inner, count in calls[call].items():
            copies[inner] += times * count
            depth[inner] = max(depth.get(inner, 0), depth.get(call, 0) + 1)
        for node in bodies[call]:
            names.update({node.name or "node": times})
            names.update(dict.fromkeys(node.output, times))
        total += times * sum(c for inner, c in calls[call].items() if inner not in calls)
    allowed = max(_MOST_NODES, _GROWTH * (top.total() + sum(c.total() for c in calls.values())))
    if total > allowed or sum(count**2 for count in names.values()) > _MOST_NAMED:
        return f"its functions become {total:,} nodes"
    deepest = max((depth.get(call, 0) for call in calls), default=0)
    return f"its functions call each other {deepest:,} deep" if deepest > _DEEPEST else ""


def _calls(proto: onnx.ModelProto) -> dict[Call, Counter[Call]]:
    """Return what each function calls, operators included, and how often."""
    return {call: _counted(nodes) for call, nodes in _bodies(proto).items()}


def _bodies(proto: onnx.ModelProto) -> dict[Call, list[onnx.NodeProto]]:
    """Return the nodes of each function, those of its overloads together."""
    bodies: dict[Call, list[onnx.NodeProto]] = {}
    for function in proto.functions:
        key = (_domain(function.domain), function.name)
        bodies.setdefault(key, []).extend(_nodes(function.node))
    return bodies


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                waiting.extend(graph.node)


def _counted(nodes: Iterable[onnx.NodeProto]) -> Counter[Call]:
    return Counter((_domain(node.domain), node.op_type) for node in nodes)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
