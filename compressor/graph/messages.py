"""Checks of an ONNX message before it is read: its tensors, nodes, and functions once inlined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import onnx
from google.protobuf.message import Message

_MOST_NODES = 20_000  # that functions may become, however small the file
_GROWTH = 10  # times the nodes of the file that they may always become
_MOST_NAMED = 100_000_000  # squares of how often each name comes: about eight seconds
_DEEPEST = 200  # functions that call each other in a row

Call = tuple[str, str]
K = TypeVar("K", bound=Hashable)


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


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the branches and bodies of a node, not those inside them."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def broken_node(proto: onnx.ModelProto) -> str:
    """Return what is wrong with a node by its operator's schema; empty if all are as they should.

    What reads a graph relies on it: attributes are of the types that the operator declares, no
    input is missing that it has to have, and names are text. Protobuf gives bytes for what is not
    UTF-8.
    """
    functions = {(_domain(f.domain), f.name): f for f in proto.functions}
    bodies = [(proto.graph.node, proto.opset_import)]
    bodies += [(function.node, function.opset_import) for function in proto.functions]
    model = {_domain(entry.domain): entry.version for entry in proto.opset_import}
    for nodes, imports in bodies:
        opsets = {_domain(entry.domain): entry.version for entry in imports}
        for domain, version in opsets.items():
            if model.get(domain, version) != version:
                return f"a function has opset {version} of {domain!r}, the graph {model[domain]}"
        for node in _nodes(nodes):
            texts = (node.op_type, node.domain, node.name, *node.input, *node.output)
            if any(isinstance(text, bytes) for text in texts):
                return f"node {node.name!r}, a {node.op_type!r}, has text that is not UTF-8"
            domain = _domain(node.domain)
            function = functions.get((domain, node.op_type))
            if function is not None:
                problem = _miscalled(node, function)
            else:
                problem = _misformed(node, _rule(node.op_type, opsets.get(domain, 0), domain))
            if problem:
                return f"node {node.name!r}, a {node.op_type!r}, {problem}"
    return ""


def _miscalled(node: onnx.NodeProto, function: onnx.FunctionProto) -> str:
    fits = len(node.input) <= len(function.input) and len(node.output) <= len(function.output)
    return "" if fits else "has more inputs or outputs than the function that it calls"


def _misformed(node: onnx.NodeProto, rule: _Rule) -> str:
    for place, name in enumerate(rule.inputs):
        if place >= len(node.input) or not node.input[place]:
            return f"lacks its input {name!r}"
    if len(node.output) < rule.outputs:
        return f"has {len(node.output)} outputs, not {rule.outputs}"
    for attribute in node.attribute:
        if rule.attributes.get(attribute.name, attribute.type) != attribute.type:
            kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
            return f"has the attribute {attribute.name!r} of type {kind}"
        if attribute.type == onnx.AttributeProto.TENSOR and not attribute.HasField("t"):
            return f"has no tensor in its attribute {attribute.name!r}"
    return ""


_LARGEST = 2**31 - 1  # version that ONNX's library takes


class _Rule(NamedTuple):
    """What an operator asks for: the inputs before optional ones, outputs, types of attributes."""

    inputs: tuple[str, ...] = ()
    outputs: int = 0
    attributes: Mapping[str, int] = MappingProxyType({})


@cache
def _rule(operator: str, opset: int, domain: str) -> _Rule:
    """Return what an operator asks for; nothing where it is not known."""
    from onnx import defs

    if abs(opset) > _LARGEST or not defs.has(operator, opset, domain):
        return _Rule()
    schema = defs.get_schema(operator, opset, domain)
    single = defs.OpSchema.FormalParameterOption.Single
    inputs = takewhile(lambda entry: entry.option == single, schema.inputs)
    types = {name: attribute.type for name, attribute in schema.attributes.items()}
    kinds = {name: kind.value for name, kind in types.items()}  # type: ignore[attr-defined]  # an enum
    return _Rule(tuple(entry.name for entry in inputs), schema.min_output, kinds)


def cyclic_function(proto: onnx.ModelProto) -> str:
    """Return the name of a function that calls itself, perhaps through others; empty if none."""
    members = members_of_cycle(_calls(proto))
    return members[0][1] if members else ""


def members_of_cycle(before: Mapping[K, Iterable[K]]) -> list[K]:
    """Return the members of a cycle, each once, or an empty list if there is none."""
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        members: list[K] = error.args[1]
        return members[:-1]
    return []


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
