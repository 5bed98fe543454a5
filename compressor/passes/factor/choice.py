"""Options of ``low-rank``, and which layers become products of two smaller ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import onnx_ir as ir
from pydantic import Field, model_validator

from compressor.errors import SpecError
from compressor.graph.costs import node_macs
from compressor.graph.layers import layers_with_nodes
from compressor.passes.factor.factored_graph import sole_path
from compressor.types.carrier import Carrier
from compressor.types.layer_rules import resolve_rules, skip_reason
from compressor.types.layers import Layer
from compressor.types.options import Options
from compressor.types.passes import LayerRule

Rank: TypeAlias = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]
Kind: TypeAlias = Literal["macs", "parameters"]

_KINDS: tuple[Kind, ...] = ("macs", "parameters")


class SizeTarget(Options):
    """How much of the model is to remain; exactly one of them."""

    macs: float | None = Field(
        default=None, gt=0, lt=1, description="multiply-accumulates that remain, as a share"
    )
    parameters: float | None = Field(
        default=None, gt=0, lt=1, description="weights that remain, as a share"
    )

    @model_validator(mode="after")
    def _one(self) -> SizeTarget:
        given = [k for k in _KINDS if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(_KINDS)}")
        return self

    @property
    def kind(self) -> Kind:
        """Which one is given."""
        return "parameters" if self.macs is None else "macs"

    @property
    def value(self) -> float:
        """Its value."""
        value = self.parameters if self.macs is None else self.macs
        assert value is not None
        return value

    @property
    def key(self) -> str:
        """Its place in a spec, such as ``target.macs``."""
        return f"target.{self.kind}"


class LowRankRule(LayerRule):
    """Per-layer settings of ``low-rank``."""

    rank: Rank | None = Field(
        default=None,
        description="these layers' rank, whatever the pass says: a number (16), or a share (0.25) "
        "of the full rank",
    )


_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layer that may become two.

    Attributes:
        layer: the layer.
        node: what multiplies with its weight.
        most: the highest rank at which two layers are smaller than this one.
        rank: the rank that an option says; ``None`` where that is to be found.
        positions: how often the weight is used for one sample; 0 where that is not known.
    """

    layer: Layer
    node: ir.Node
    most: int
    rank: int | None
    positions: int

    @property
    def full(self) -> int:
        """The highest rank that its weight can have."""
        return full_rank(self.layer)


@dataclass(frozen=True)
class Choice:
    """What can be done to each layer.

    Attributes:
        candidates: the layers that can become two, in the order of execution.
        reasons: why a layer stays whole, for every layer in order; empty where it need not.
    """

    candidates: tuple[Candidate, ...]
    reasons: Mapping[str, str]


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
    *,
    counted: bool,
) -> Choice:
    """Find the layers that can become two.

    Args:
        carrier: the model; it has a graph.
        everywhere: the rank of layers for which no rule says one.
        rules: for single layers; the first that matches wins.
        counted: layers whose multiply-accumulates are not known stay whole.

    Raises:
        SpecError: a rule matches no layer, or gives one a rank that it cannot have.
    """
    ruled = resolve_rules(rules, [layer.name for layer in carrier.layers()])
    model = carrier.graph()
    nodes: dict[str, ir.Node] = {}
    for found, node in layers_with_nodes(model):
        nodes.setdefault(found.weight, node)
    candidates = []
    reasons: dict[str, str] = {}
    for layer in carrier.layers():
        rule, node = ruled[layer.name], nodes[layer.weight]
        reason = skip_reason(rule) or obstacle(model, layer, node)
        positions = 0 if reason else node_macs(node) // layer.parameters
        if not reason and counted and not positions:
            reason = "its multiply-accumulates are not known"
        rank = None
        if not reason:
            own = None if rule is None else rule.rank
            given = everywhere if own is None else own
            rank = None if given is None else _rank(layer, given, of_rule=own is not None)
            reason = "" if rank is None else _wasted(layer, rank)
        reasons[layer.name] = reason
        if not reason:
            candidates.append(Candidate(layer, node, most_saving(layer), rank, positions))
    return Choice(tuple(candidates), reasons)


def obstacle(model: ir.Model, layer: Layer, node: ir.Node) -> str:
    """Say why a layer cannot become two smaller ones; empty if it can."""
    if layer.kind == "Gather":
        return "a table is looked up, not multiplied"
    if layer.dtype not in _FLOATS:
        return f"its weight is {layer.dtype}"
    if node.graph is not model.graph or layer.weight not in model.graph.initializers:
        return "it lies in a subgraph"
    if layer.kind == "ConvTranspose":
        return "a transposed convolution is not factored"
    if layer.groups > 1:
        return f"a convolution of {layer.groups} groups is not factored"
    if sole_path(node) is None:
        return "its weight is computed, or read by others as well"
    if most_saving(layer) < 1:
        return f"{layer.rows} x {layer.columns} is no smaller in two, at any rank"
    return ""


def _rank(layer: Layer, given: Rank, *, of_rule: bool) -> int:
    """Return a layer's rank in numbers.

    Raises:
        SpecError: its own rule says more than the full rank.
    """
    full = full_rank(layer)
    if isinstance(given, float):
        return max(1, round(given * full))
    if given > full and of_rule:
        raise SpecError(
            f"layer {layer.name!r}",
            f"its rule says rank {given}, and its full rank is {full}",
            f"give at most {max(most_saving(layer), 1)}, above which two layers are not smaller",
        )
    return given


def _wasted(layer: Layer, rank: int) -> str:
    full, most = full_rank(layer), most_saving(layer)
    if rank > full:
        return f"rank {rank} is above its full rank, {full}"
    return f"at rank {rank} of {full} two are no smaller; at {most} they are" if rank > most else ""
