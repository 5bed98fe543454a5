"""Layers that can become two smaller ones, and the graph in which they are two."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor
from pydantic import Field
from torch import Tensor

from compressor.errors import SpecError
from compressor.graph.costs import Sample, at_lengths, node_macs
from compressor.graph.editing import Editor
from compressor.graph.layers import layers_with_nodes
from compressor.graph.operators import operator
from compressor.graph.stored_weights import sole_path
from compressor.run.weight_pass import FLOATS
from compressor.types.carrier import Carrier
from compressor.types.layer_rules import resolve_rules, skip_reason
from compressor.types.layers import Layer
from compressor.types.passes import LayerRule

Rank: TypeAlias = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]


class LowRankRule(LayerRule):
    """Per-layer settings of ``low-rank``."""

    rank: Rank | None = Field(
        default=None,
        description="these layers' rank, whatever the pass says: a number (16), or a share (0.25) "
        "of the full rank",
    )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layer that may become two, and the node that multiplies with its weight."""

    layer: Layer
    node: ir.Node
    most: int  # the highest rank at which two layers are smaller than this one
    rank: int | None  # the rank that an option sets; `None` if it is still to be chosen
    positions: int  # how often the weight is used for one sample; 0 if that is not known


@dataclass(frozen=True)
class Choice:
    """The layers that can become two, in the order of execution, and why each other stays whole.

    Every layer has a reason, in order; it is empty for candidates. ``sample`` holds shapes of
    inputs, for which work is counted.
    """

    candidates: tuple[Candidate, ...]
    reasons: Mapping[str, str]
    sample: Sample


def full_rank(layer: Layer) -> int:
    """Return the highest rank that a layer's weight can have."""
    return min(layer.rows, layer.columns)


def most_saving(layer: Layer) -> int:
    """Return the highest rank that takes fewer weights than the layer; 0 if there is none.

    Two layers take ``rank * (rows + columns)`` in place of ``rows * columns``, of weights and, at
    each position, of multiply-accumulates.
    """
    return (layer.parameters - 1) // (layer.rows + layer.columns)


def choose(
    carrier: Carrier,
    everywhere: Rank | None,
    rules: Sequence[LowRankRule],
    sample: Sample,
    *,
    counted: bool,
) -> Choice:
    """Find the layers that can become two.

    Layers for which no rule sets a rank get that of ``everywhere``. If ``counted``, those whose
    multiply-accumulates in a sample are unknown stay whole.

    Raises:
        SpecError: a rule matches no layer, or gives one a rank that it cannot have.
    """
    ruled = resolve_rules(rules, carrier.layers())
    model = carrier.graph()
    nodes: dict[str, ir.Node] = {}
    for layer, node in layers_with_nodes(model):
        nodes.setdefault(layer.weight, node)
    sized = dict(zip(model.graph, at_lengths(model, sample).graph, strict=True))
    candidates = []
    reasons: dict[str, str] = {}
    for layer in carrier.layers():
        if layer.is_recurrent:
            reasons[layer.name] = "the weight of a recurrent layer is not factored"
            continue
        rule, node = ruled[layer.name], nodes[layer.weight]
        reason = skip_reason(rule) or obstacle(model, layer, node)
        positions = 0 if reason else node_macs(sized[node]) // layer.parameters
        if not reason and counted and not positions:
            reason = "its multiply-accumulates are not known"
        ruled_rank, rank = None if rule is None else rule.rank, None
        option = everywhere if ruled_rank is None else ruled_rank
        if not reason and option is not None:
            rank = _rank(layer, option, of_rule=ruled_rank is not None)
            reason = _wasted(layer, rank)
        reasons[layer.name] = reason
        if not reason:
            candidates.append(Candidate(layer, node, most_saving(layer), rank, positions))
    return Choice(tuple(candidates), reasons, sample)


def obstacle(model: ir.Model, layer: Layer, node: ir.Node) -> str:
    """Return why a layer cannot become two smaller ones; empty if it can."""
    if layer.is_table:
        return "a table is looked up, not multiplied"
    if layer.dtype not in FLOATS:
        return f"its weight is {layer.dtype}"
    if node.graph is not model.graph or layer.weight not in model.graph.initializers:
        return "it lies in a subgraph"
    if layer.is_transposed_convolution:
        return "a transposed convolution is not factored"
    if layer.groups > 1:
        return f"a convolution of {layer.groups} groups is not factored"
    if sole_path(node) is None:
        return "its weight is computed, or read by others as well"
    if most_saving(layer) < 1:
        return f"{layer.rows} x {layer.columns} is no smaller in two, at any rank"
    return ""


def _rank(layer: Layer, option: Rank, *, of_rule: bool) -> int:
    """Return a layer's rank as a number; raise ``SpecError`` if its rule exceeds the full rank."""
    full = full_rank(layer)
    if isinstance(option, float):
        return max(1, round(option * full))
    if option > full and of_rule:
        raise SpecError(
            f"layer {layer.name!r}",
            f"its rule says rank {option}, and its full rank is {full}",
            f"give at most {max(most_saving(layer), 1)}, above which two layers are not smaller",
        )
    return option


def _wasted(layer: Layer, rank: int) -> str:
    """Return why a rank saves nothing; empty if it saves."""
    full, most = full_rank(layer), most_saving(layer)
    if rank > full:
        return f"rank {rank} is above its full rank, {full}"
    return (
        f"at rank {rank} of {full} two layers are no smaller; at {most} they are"
        if rank > most
        else ""
    )


@dataclass(frozen=True, eq=False)
class Factors:
    """A layer's weight as a product."""

    layer: Layer  # the layer, in the graph to change
    down: Tensor  # `[rank, columns]`; reads the layer's input
    up: Tensor  # `[rows, rank]`; writes its output and adds its bias


def factor_names(layer: str, taken: Collection[str]) -> tuple[str, str]:
    """Return the names of the two layers that a layer becomes, ``NAME.down`` and ``NAME.up``.

    If a weight's name is among those taken by initializers, both names get a number.
    """
    number, mark = 0, ""
    while any(f"{layer}.{part}{mark}.weight" in taken for part in ("down", "up")):
        number += 1
        mark = f"_{number}"
    return f"{layer}.down{mark}", f"{layer}.up{mark}"


def factored(model: ir.Model, factors: Sequence[Factors]) -> tuple[ir.Model, tuple[str, ...]]:
    """Return a copy of a graph in which layers are products of two.

    A convolution becomes one with ``rank`` filters of the same size, strides and pads, and a 1x1
    convolution behind it (E. Denton et al., 2014, arXiv:1404.0736; X. Zhang et al., 2015,
    arXiv:1505.06798). The second layer's node is the old one, so that the output keeps its name.
    Each layer's weight must have a :func:`sole_path`.

    Returns:
        The graph and the names of the new weights.

    Raises:
        KeyError: the graph has no such layer.
    """
    changed = model.clone()
    editor = Editor(changed)
    nodes = {layer.weight: node for layer, node in layers_with_nodes(changed)}
    names: list[str] = []
    for one in factors:
        names += _split(editor, nodes[one.layer.weight], one)
    return changed, tuple(names)


def _split(editor: Editor, node: ir.Node, factors: Factors) -> tuple[str, str]:
    layer, views = factors.layer, sole_path(node)
    assert views is not None, "the layer has a weight of its own"
    swapped = sum(operator(view).moves == "order" for view in views) % 2 == 1
    weight, old = node.inputs[1], editor.model.graph.initializers[layer.weight]
    assert weight is not None
    down_name, up_name = factor_names(layer.name, editor.model.graph.initializers)
    parts = (down_name, factors.down, False), (up_name, factors.up, True)
    down, up = first, second = [
        editor.initializer(f"{name}.weight", TorchTensor(_stored(layer, matrix, narrow).detach()))
        for name, matrix, narrow in parts
    ]
    if swapped:
        first, second = (_turned(editor, node, value) for value in (down, up))
    output = node.outputs[0]
    attributes = {name: a.value for name, a in node.attributes.items()}
    if layer.is_linear:
        attributes = {k: v for k, v in attributes.items() if k in ("transA", "transB")}
        node.attributes.pop("transA", None)
    elif layer.is_convolution:
        node.attributes.clear()
        node.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", [1] * len(layer.shape[2:]))
    narrow = editor.node(node.op_type, [node.inputs[0], first], down_name, output.dtype, attributes)
    if output.shape is not None:
        lengths = list(output.shape.dims)
        lengths[1 if layer.is_convolution else -1] = len(factors.down)
        narrow.outputs[0].shape = ir.Shape(lengths)
    node.prepend([narrow])
    node.replace_input_with(0, narrow.outputs[0])
    node.replace_input_with(1, second)
    for view in reversed(views):
        editor.model.graph.remove(view, safe=True)
    editor.release(old)
    return down.name or "", up.name or ""


def _stored(layer: Layer, matrix: Tensor, narrow: bool) -> Tensor:
    """Return a factor in the form in which the layer's weight is stored."""
    if layer.is_convolution:
        form = (*matrix.shape, *[1] * len(layer.shape[2:])) if narrow else (-1, *layer.shape[1:])
        return matrix.reshape(form)
    return matrix.T if layer.transposed else matrix


def _turned(editor: Editor, node: ir.Node, value: ir.Value) -> ir.Value:
    """Return the transpose of a weight, computed in front of a node."""
    made = editor.node("Transpose", [value], f"{value.name}.T", value.dtype, {"perm": (1, 0)})
    assert value.shape is not None
    made.outputs[0].shape = ir.Shape(tuple(reversed(value.shape.dims)))
    node.prepend([made])
    return made.outputs[0]
