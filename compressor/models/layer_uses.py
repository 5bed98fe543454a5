"""How a model uses its layers: tables, output layers, weights inside branches, nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import onnx_ir as ir

from compressor.graph.layers import index_limits, layers_of, layers_with_nodes, moment_request
from compressor.graph.operators import operator
from compressor.graph.stored_weights import weight_source
from compressor.graph.values import all_nodes
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer, StoredTensor
from compressor.types.statistics import Request

LOOKED_UP = "a table is looked up, not multiplied"
"""Why a pass that is about products leaves a table as it is."""

_LARGE_TABLE = 1 << 16
"""Weights from which a table is worth the nodes that look rows up in its codes."""
OUTPUT_LAYERS = ("lm_head", "embed_out")
"""Names of layers that make scores of tokens."""
MIXED = "its readers disagree about what its output channels are"
"""Why a weight with a scale for each output channel cannot be multiplied as codes."""
# By number, or a stack; fuse puts the number behind the name of a stack that it has divided.
_EXPERTS = re.compile(r"(.+)\.experts\.(?:(\d+)\..+|.+\.(\d+)|.+)")
_SINGLE = re.compile(r"\.experts\.\d+\.")
_FUSED_AXES = 3


def is_single_expert(name: str) -> bool:
    """Return whether a layer or its weight is one of an expert that is stored by itself."""
    return _SINGLE.search(name) is not None


def inner_layers(carrier: Carrier) -> dict[str, str]:
    """Return, by name, the layers whose weight lies in a subgraph, with that as the reason."""
    if Capability.GRAPH not in carrier.offers:
        return {}
    outer = carrier.graph().graph.initializers
    inner = (layer.name for layer in carrier.layers() if layer.weight not in outer)
    return dict.fromkeys(inner, "its weight lies in a subgraph")


def recurrences(carrier: Carrier) -> dict[str, str]:
    """Return, by name, the weights of recurrent layers, with that as the reason to keep them."""
    reason = "the weight of a recurrent layer"
    return {layer.name: reason for layer in carrier.layers() if layer.is_recurrent}


def computed_weights(carrier: Carrier) -> tuple[str, ...]:
    """Return a note if layers compute their weights of stored ones as the model runs, else none.

    That is how PyTorch's exporter writes recurrent layers, and layers whose weight is a part of a
    parameter or lies in another order; a pass that changes stored weights misses those.
    """
    if Capability.GRAPH not in carrier.offers:
        return ()
    graph = carrier.graph().graph
    nodes = [n for n in all_nodes(graph) if operator(n).recurrent and not layers_of(n)]
    names = [node.op_type for node in (*_computing(graph), *nodes)]
    if not names:
        return ()
    counted = ", ".join(f"{n} {kind}" for kind, n in Counter(names).items())
    return (
        f"weights computed as the model runs stay floats: {counted}; put fuse before this pass",
    )


def _computing(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the products whose weight is computed of constants in a way that is not seen through.

    Products of constants alone are not among them.
    """
    constants = set(graph.initializers.values())
    for node in graph:
        row = operator(node)
        if all(value is None or value in constants for value in node.inputs):
            constants.update(node.outputs)
        elif row.is_product and len(node.inputs) > row.weight:
            weight = node.inputs[row.weight]
            computed = weight in constants and weight is not None and not weight.is_initializer()
            if computed and weight_source(weight)[0] is None:
                yield node


def small_table(layer: Layer) -> str:
    """Return why a table stays as it is where large ones become codes; empty if it is large."""
    if layer.parameters >= _LARGE_TABLE:
        return ""
    return (
        f"a table below {_LARGE_TABLE:,} weights stays; quantize-weights stores it with "
        "embeddings: true"
    )


def kept_tables(carrier: Carrier) -> dict[str, str]:
    """Return why tables, and the output layer that belongs to one, are kept, by layer name."""
    layers = carrier.layers()
    reasons = {layer.name: LOOKED_UP for layer in layers if layer.is_table}
    for layer in layers:
        if layer.name.rpartition(".")[2] in OUTPUT_LAYERS:
            reasons[layer.name] = "it is the output layer"
    if Capability.GRAPH in carrier.offers:
        reasons.update(_shared_tables(carrier.graph(), layers))
    return reasons


def routers(carrier: Carrier) -> dict[str, str]:
    """Return why layers that choose among experts are kept, by layer name.

    They lie beside the experts and have a row for each of them, or a single row for one that all
    tokens share. They are small, and a rounded one sends tokens to other experts.
    """
    experts = _expert_counts(carrier.tensors())
    reasons = {}
    for layer in carrier.layers():
        parts = layer.name.split(".")
        beside = (".".join(parts[:end]) for end in range(1, len(parts)))
        rows = next((experts[path] for path in beside if path in experts), None)
        chooses = rows is not None and "experts" not in parts and layer.rows in (rows, 1)
        if (chooses or "router" in parts) and layer.is_linear:
            reasons[layer.name] = "it chooses among experts"
    return reasons


def _expert_counts(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the number of experts below each path that has some."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        match = _EXPERTS.fullmatch(tensor.name)
        number = (match[2] or match[3]) if match else None
        if match and number:
            counts[match[1]] = max(counts.get(match[1], 0), int(number) + 1)
        elif match and len(tensor.shape) == _FUSED_AXES:
            counts[match[1]] = tensor.shape[0]
    return counts


def observed_inputs(carrier: Carrier, rows_per_column: int | None = None) -> dict[str, Request]:
    """Return the request for the second moment of each layer's input, by layer name.

    As :func:`input_moments`, and also for checkpoints whose blocks are run one at a time.
    """
    if not isinstance(carrier, BlockCheckpoint):
        return input_moments(carrier.graph(), rows_per_column)
    options = {} if rows_per_column is None else {"rows_per_column": rows_per_column}
    return {
        name: Request(value, "second-moment", dict(options))
        for name, value in carrier.observed.items()
    }


def input_limits(carrier: Carrier) -> dict[str, int]:
    """Return the number of rows of the table that an input indexes, by input."""
    if isinstance(carrier, BlockCheckpoint):
        return {spec.name: carrier.decoder.vocabulary for spec in carrier.inputs}
    return index_limits(carrier.graph()) if Capability.GRAPH in carrier.offers else {}


def _shared_tables(model: ir.Model, layers: Sequence[Layer]) -> dict[str, str]:
    """Find what names do not tell: a table that is also multiplied, an output layer."""
    reasons = {}
    looked_up: dict[str, set[bool]] = {}
    for layer, _ in layers_with_nodes(model):
        looked_up.setdefault(layer.weight, set()).add(layer.is_table)
    for layer in layers:
        if len(looked_up.get(layer.weight, ())) > 1:
            reasons[layer.name] = "its weight is shared with a table"
    outputs = {value.name for value in model.graph.outputs}
    tables = {(layer.rows, layer.columns) for layer in layers if layer.is_table}
    for layer in layers:
        if layer.output in outputs and (layer.rows, layer.columns) in tables:
            reasons.setdefault(layer.name, "it is the output layer")
    return reasons


def nodes_of(model: ir.Model) -> dict[str, tuple[Layer, ir.Node]]:
    """Return each layer of the main graph with the first node that multiplies with its weight."""
    nodes: dict[str, tuple[Layer, ir.Node]] = {}
    for layer, node in layers_with_nodes(model):
        if node.graph is model.graph and not layer.is_table:
            nodes.setdefault(layer.name, (layer, node))
    return nodes


def input_moments(model: ir.Model, rows_per_column: int | None = None) -> dict[str, Request]:
    """Return the request for the second moment of each layer's input, by layer name.

    Layers whose input calibration cannot see are left out.

    Args:
        rows_per_column: input vectors to look at for each of their elements; all, if left out.
    """
    requests = {
        name: moment_request(layer, node, rows_per_column)
        for name, (layer, node) in nodes_of(model).items()
    }
    return {name: request for name, request in requests.items() if request is not None}


def paired_positions(layer: Layer) -> int | None:
    """Return the kernel's positions, if integer kernels add a layer's products in pairs.

    Returns:
        1 for a product; ``None`` for what multiplies floats, or in 32 bits as depthwise
        convolutions do. See :class:`compressor.types.layers.Scheme`.
    """
    depthwise = layer.is_convolution and layer.shape[1] == 1 and layer.rows == layer.groups
    if layer.is_transposed_convolution or layer.is_table or depthwise:
        return None
    return prod(layer.shape[2:]) if layer.is_convolution else 1
