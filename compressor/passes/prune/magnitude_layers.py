"""Which layers ``prune-magnitude`` thins out, by how much, and why it keeps the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import onnx_ir as ir
from pydantic import Field

from compressor.errors import SpecError
from compressor.graph.layers import layers_with_nodes
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import resolve_rules, skip_reason
from compressor.types.layers import Layer
from compressor.types.passes import LayerRule

_FLOATS = ("float16", "bfloat16", "float32", "float64")


class MagnitudeRule(LayerRule):
    """Per-layer settings of ``prune-magnitude``."""

    sparsity: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of these layers' weights that become zero; scope layer only",
    )


@dataclass(frozen=True)
class Thinning:
    """What is done to the layers of a model.

    Attributes:
        sparsity: of the layers that lose weights, by name: the share each is asked to lose.
        reasons: why a layer is kept, for every layer in order; empty where it is not.
    """

    sparsity: Mapping[str, float]
    reasons: Mapping[str, str]


def number_of(sparsity: float, units: int) -> int:
    """Return how many units a share is: whole ones, never more than the share as it is written.

    In decimals: in binary, 0.29 of 100 would be 28.
    """
    return int(Decimal(repr(sparsity)) * units)


def choose_layers(
    carrier: Carrier,
    sparsity: float,
    block: tuple[int, int],
    rules: Sequence[MagnitudeRule],
    *,
    each: bool,
) -> Thinning:
    """Choose the layers that lose weights, or say why one is kept.

    Args:
        carrier: the model; its structure is read.
        sparsity: for layers without one of their own.
        block: rows and columns of what goes as a whole.
        rules: for single layers.
        each: the share is each layer's own, rather than of all together.

    Raises:
        SpecError: a rule matches no layer, or asks for what its layer cannot have.
    """
    layers = carrier.layers()
    found = resolve_rules(rules, [layer.name for layer in layers])
    graph = carrier.graph() if Capability.GRAPH in carrier.offers else None
    shared = _read_as_tables(graph)
    wanted: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for layer in layers:
        rule = found[layer.name]
        own = sparsity if rule is None or rule.sparsity is None else rule.sparsity
        reason = skip_reason(rule) or _unfit(layer, shared, graph) or _misfit(layer, block)
        if not reason and each and not number_of(own, _units(layer, block)):
            units = _units(layer, block)
            reason = f"{own:g} of its {units} {'weights' if block == (1, 1) else 'blocks'} is none"
        if reason and rule is not None and rule.sparsity is not None and not rule.skip:
            raise SpecError(
                f"layer {layer.name!r}",
                f"is given a sparsity by the rule {rule.match!r}, and cannot have it: {reason}",
                "narrow the rule's match, or change the block or the sparsity",
            )
        reasons[layer.name] = reason
        if not reason:
            wanted[layer.name] = own
    return Thinning(wanted, reasons)


def _units(layer: Layer, block: tuple[int, int]) -> int:
    return layer.parameters // (block[0] * block[1])


def _unfit(layer: Layer, shared: frozenset[str], graph: ir.Model | None) -> str:
    """Say why a layer's weights stay as they are, whatever the options; empty if they need not."""
    if layer.kind == "Gather":
        return "a table is looked up, not multiplied"
    if layer.weight in shared:
        return "its weight is shared with a table"
    if graph is not None and layer.weight not in graph.graph.initializers:
        return "its weight lies in a subgraph"
    if layer.dtype not in _FLOATS:
        return f"its weight is {layer.dtype}: prune before quantizing"
    return ""


def _misfit(layer: Layer, block: tuple[int, int]) -> str:
    height, width = block
    if layer.rows % height == 0 and layer.columns % width == 0:
        return ""
    return (
        f"{layer.rows} rows of {layer.columns} columns do not divide into blocks of "
        f"{height}x{width}"
    )


def _read_as_tables(graph: ir.Model | None) -> frozenset[str]:
    """Return the weights that are looked up somewhere in a graph."""
    if graph is None:
        return frozenset()
    return frozenset(x.weight for x, _ in layers_with_nodes(graph) if x.kind == "Gather")
