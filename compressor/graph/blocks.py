"""Parts of a graph: blocks in sequence, and branches inside nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from compressor.graph.editing import inner_nodes
from compressor.graph.inference import infer_shapes
from compressor.graph.layers import layer_of
from compressor.graph.messages import subgraphs
from compressor.graph.operators import operator, operator_named
from compressor.graph.values import DEFAULT_DOMAINS, input_of, value_by_name

_ITSELF = -1  # in place of a branch: the graph that holds them
_CUT = 1  # values that may be live where the graph is cut


@dataclass(frozen=True, eq=False)
class GraphBlock:
    """A run of nodes between two cuts.

    Attributes:
        entry: the value that comes from the block before; ``None`` in the first block.
        exit: the value that the next block starts from; ``None`` in the last block.
        inputs: names of the model's inputs that it reads, its preamble included.
        weights: names of the initializers that it reads, in the order of execution.
        reads: names of all values that its nodes read; those of the preamble's nodes are not
            among them.
        computes: names of all values that its nodes give; those of the preamble are not among them.
    """

    entry: str | None
    exit: str | None
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    reads: frozenset[str]
    computes: frozenset[str]


def partition(model: ir.Model, *, past_sizes: bool = False) -> tuple[GraphBlock, ...]:
    """Cut a graph into blocks, each with at least one layer that multiplies.

    Model outputs do not keep values alive, since blocks only show what flows into layers. A graph
    that cannot be cut is one block.

    Args:
        model: sorted topologically, as ONNX wants it.
        past_sizes: cut also where the size of an input, such as its batch, is read further on:
            blocks that need it read the input again.
    """
    nodes = [n for n in model.graph if not (past_sizes and _reads_size(n))]
    inputs = model.graph.inputs
    sources = frozenset(v for v in inputs if v.dtype is not None and v.dtype.is_floating_point())
    flowing = _flowing(nodes, sources, tables=True)
    cuts = _cuts(flowing, sources)
    if not cuts:
        # All blocks read a table of position biases or a float mask: treat it as preamble.
        flowing = _flowing(nodes, frozenset(), tables=False)
        cuts = _cuts(flowing, frozenset())
    blocks: list[GraphBlock] = []
    start, entry = 0, None
    for end, value in [*cuts, (len(flowing) - 1, None)]:
        blocks.append(_block(flowing[start : end + 1], entry, value))
        start, entry = end + 1, value
    return tuple(blocks)


def extract_block(
    model: ir.Model,
    block: GraphBlock,
    outputs: Sequence[str],
    changes: Mapping[str, torch.Tensor],
) -> ir.Model:
    """Return a block as a model of its own.

    Args:
        model: the one that was partitioned; not changed.
        outputs: names of the values it is to yield, none of them an input of the block.
        changes: initializers to replace, in their stored shape; the others are shared with
            ``model``.
    """
    inputs = [*([block.entry] if block.entry else []), *block.inputs]
    graph = ir.convenience.extract(model.graph, inputs, outputs)
    for name in graph.initializers.keys() & changes.keys():
        tensor = changes[name].contiguous()
        graph.initializers[name].const_value = tensor_adapters.TorchTensor(tensor, name=name)
    graph.opset_imports.update(model.opset_imports)
    return ir.Model(graph, ir_version=model.ir_version)


def reaching(model: ir.Model, block: GraphBlock, names: Iterable[str]) -> GraphBlock:
    """Return a block with the model inputs that further values are computed from.

    Args:
        model: the one that was partitioned.
        names: values that are computed from the block's entry and the model's inputs.
    """
    values = value_by_name(model)
    pending = [values[name] for name in names]
    inputs, seen = dict.fromkeys(block.inputs), set[ir.Value]()
    while pending:
        value = pending.pop()
        if value in seen or value.name == block.entry:
            continue
        seen.add(value)
        if value.is_graph_input():
            inputs.setdefault(value.name or "")
        elif (producer := value.producer()) is not None:
            pending += values_read(producer)
    return replace(block, inputs=tuple(inputs))


def block_outputs(model: ir.Model, block: GraphBlock) -> list[str]:
    """Return the values that a block is to reproduce: its exit, and model outputs computed in it.

    In place of outputs that are as long as their values decide, such as boxes above a threshold,
    it is what these are chosen from and by: lists of two lengths cannot be compared.
    """
    exits = [block.exit] if block.exit else []
    if exits and len(model.graph.outputs) == 1:
        return exits
    nodes = [node for node in model.graph if any(v.name in block.computes for v in node.outputs)]
    computed, selected, sources = set[ir.Value](), set[ir.Value](), list[ir.Value]()
    for node in nodes:
        read = set(values_read(node))
        computed.update(node.outputs)
        if operator(node).family == "selection" and selected.isdisjoint(read):
            sources += [v for v in node.inputs if v is not None and v in computed]
        if operator(node).family == "selection" or not selected.isdisjoint(read):
            selected.update(node.outputs)
    floats = [v for v in model.graph.outputs if v.dtype is None or v.dtype.is_floating_point()]
    outputs = [v for v in floats if v in computed and v not in selected]
    outputs += _floats(sources, computed, _types(model)) if sources else []
    return list(dict.fromkeys([*exits, *(v.name or "" for v in outputs)]))


def _types(model: ir.Model) -> Mapping[str, ir.DataType | None]:
    """Return the types of all values, those that the file leaves out included."""
    copy = model.clone()
    infer_shapes(copy)  # and types
    return {value.name or "": value.dtype for node in copy.graph for value in node.outputs}


def _floats(
    values: Iterable[ir.Value | None],
    computed: Collection[ir.Value],
    types: Mapping[str, ir.DataType | None],
) -> list[ir.Value]:
    """Return the values that are floats, and for others the floats that they are computed from."""
    found: list[ir.Value] = []
    for value in values:
        if value is None or value not in computed or (node := value.producer()) is None:
            continue
        dtype = types[value.name or ""]
        if dtype is not None and dtype.is_floating_point():
            found.append(value)
        else:
            found += _floats(node.inputs, computed, types)
    return found


def values_read(node: ir.Node) -> Iterator[ir.Value]:
    """Yield what a node and the nodes inside it read, apart from what is defined inside."""
    inner = inner_nodes(node)
    inside = {value for reader in inner for value in reader.outputs}
    for value in (value for reader in (node, *inner) for value in reader.inputs):
        formal = value is not None and value.is_graph_input() and value.graph is not node.graph
        if value is not None and not formal and value not in inside:
            yield value


def _flowing(
    nodes: Sequence[ir.Node], sources: frozenset[ir.Value], *, tables: bool
) -> list[ir.Node]:
    """Return the nodes that depend on a layer or on ``sources``; the others are preamble."""
    carried = set(sources)
    flowing = []
    for node in nodes:
        if (
            _multiplies(node)
            or (tables and _is_table(node))
            or not carried.isdisjoint(values_read(node))
        ):
            carried.update(node.outputs)
            flowing.append(node)
    return flowing


def _reads_size(node: ir.Node) -> bool:
    value = input_of(node, 0)
    return operator(node).family == "shape" and value is not None and value.is_graph_input()


def _multiplies(node: ir.Node) -> bool:
    layers = (layer_of(inner) for inner in (node, *inner_nodes(node)))
    return any(layer is not None and not layer.is_table for layer in layers)


def _is_table(node: ir.Node) -> bool:
    layer = layer_of(node)
    return layer is not None and layer.is_table


def _cuts(flowing: Sequence[ir.Node], sources: frozenset[ir.Value]) -> list[tuple[int, str]]:
    """Return the places to cut: the last node before the cut, and the only value that is live."""
    last_use = {value: index for index, node in enumerate(flowing) for value in values_read(node)}
    multiplies = [_multiplies(node) for node in flowing]
    live = {value for value in sources if value in last_use}
    cuts: list[tuple[int, str]] = []
    layers, left = 0, sum(multiplies)
    for index, node in enumerate(flowing):
        live.update(value for value in node.outputs if last_use.get(value, -1) > index)
        live = {value for value in live if last_use[value] > index}
        layers, left = layers + multiplies[index], left - multiplies[index]
        if len(live) == _CUT and layers and left:
            (value,) = live
            again = bool(cuts) and cuts[-1][1] == value.name  # between heads on one value
            if value.name and not value.is_graph_input() and not again:
                cuts.append((index, value.name))
                layers = 0
    return cuts


def _block(nodes: Sequence[ir.Node], entry: str | None, exit: str | None) -> GraphBlock:
    """Describe some nodes together with the preamble that they need."""
    inside = set(nodes)
    inputs: dict[str, None] = {}
    weights: dict[str, None] = {}
    seen: set[ir.Value] = set()

    def visit(value: ir.Value) -> None:
        pending = [value]
        while pending:
            value = pending.pop()
            if value in seen or value.name is None or value.name == entry:
                continue
            seen.add(value)
            if value.is_initializer():
                weights.setdefault(value.name)
            elif value.is_graph_input():
                inputs.setdefault(value.name)
            elif (producer := value.producer()) is not None and producer not in inside:
                pending.extend(reversed(list(values_read(producer))))

    for node in nodes:
        for value in values_read(node):
            visit(value)
    return GraphBlock(
        entry,
        exit,
        tuple(inputs),
        tuple(weights),
        frozenset(v.name for node in nodes for v in values_read(node) if v.name),
        frozenset(v.name for node in nodes for v in node.outputs if v.name),
    )


def inner_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield the branches and bodies of a graph's nodes, not those inside them."""
    for node in graph.node:
        yield from subgraphs(node)


def all_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a graph and of all graphs inside it."""
    yield from graph.initializer
    for inner in inner_graphs(graph):
        yield from all_initializers(inner)


def sink_constants(graph: onnx.GraphProto) -> None:
    """Move what one branch alone reads into that branch, in place.

    That is initializers, and nodes that compute something of these alone, such as floats of codes:
    ONNX Runtime chooses a faster layout for a weight, and prepares it once, only where the weight
    is a constant of the graph that multiplies with it.
    """
    branches = list(inner_graphs(graph))
    if not branches:
        return
    readers: dict[str, list[int]] = defaultdict(list)
    for index, branch in enumerate(branches):
        for name in set(names_read(branch)):
            readers[name].append(index)
    for names in (*(node.input for node in graph.node), (v.name for v in graph.output)):
        for name in names:
            readers[name].append(_ITSELF)
    _sink_nodes(graph, branches, readers)
    given = {value.name for value in graph.input}
    for index in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[index]
        place = _only(readers[tensor.name])
        if place is not None and tensor.name not in given:
            branches[place].initializer.insert(0, tensor)
            del graph.initializer[index]
    for branch in branches:
        sink_constants(branch)


def _sink_nodes(
    graph: onnx.GraphProto,
    branches: Sequence[onnx.GraphProto],
    readers: Mapping[str, list[int]],
) -> None:
    constants = {tensor.name for tensor in graph.initializer} - {v.name for v in graph.input}
    computed = []
    for index, node in enumerate(graph.node):
        row = operator_named(node.op_type)
        plain = not row.random and row.family != "control" and node.domain in DEFAULT_DOMAINS
        if plain and node.input and all(name in constants for name in node.input if name):
            constants.update(node.output)
            computed.append(index)
    for index in reversed(computed):
        node = graph.node[index]
        places = {_only(readers[name]) for name in node.output if name}
        if len(places) != 1 or (place := places.pop()) is None:
            continue
        for name in node.input:
            readers[name].remove(_ITSELF)
            readers[name].append(place)
        branches[place].node.insert(0, node)
        del graph.node[index]


def _only(places: Sequence[int]) -> int | None:
    """Return the branch that reads a value if nothing else does."""
    only = set(places)
    place = next(iter(only), _ITSELF)
    return None if len(only) != 1 or place == _ITSELF else place


def names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names that a graph and those inside it read, outputs included."""
    for node in graph.node:
        yield from node.input
    for output in graph.output:
        yield output.name
    for inner in inner_graphs(graph):
        yield from names_read(inner)
