"""Which layers can be pruned to a pattern, and why the others are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from compressor.errors import SpecError
from compressor.graph.layers import layers_with_nodes
from compressor.passes.prune.sparse.patterns import Pattern
from compressor.passes.quantize.weights.layers import kept_tables
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import RuleT, resolve_rules, skip_reason
from compressor.types.layers import Layer

_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Chosen:
    """What is done to each layer.

    Attributes:
        patterns: of the layers that are pruned, by name.
        reasons: why a layer is kept, for every layer in order; empty where it is not.
    """

    patterns: Mapping[str, Pattern]
    reasons: Mapping[str, str]


def choose_layers(
    carrier: Carrier,
    everywhere: Pattern,
    rules: Sequence[RuleT],
    own: Callable[[RuleT], Pattern | None],
) -> Chosen:
    """Choose a pattern for each layer, or say why it is kept.

    Args:
        carrier: the model.
        everywhere: the pattern of layers for which no rule says another.
        rules: for single layers; the first that matches wins.
        own: returns the pattern that a rule says; a layer that cannot have it is an error.

    Raises:
        SpecError: a rule matches no layer, or gives one a pattern that does not fit it.
    """
    ruled = resolve_rules(rules, [layer.name for layer in carrier.layers()])
    kept = {**_unlike_readers(carrier), **kept_tables(carrier)}
    inner = _in_subgraphs(carrier)
    patterns: dict[str, Pattern] = {}
    reasons: dict[str, str] = {}
    for layer in carrier.layers():
        rule = ruled[layer.name]
        said = None if rule is None else own(rule)
        pattern = said or everywhere
        reason = skip_reason(rule) or kept.get(layer.name, "")
        if not reason and layer.name in inner:
            reason = "its weight lies in a subgraph"
        if not reason and layer.dtype not in _FLOATS:
            reason = f"its weight is {layer.dtype}"
        if not reason:
            reason = misfit(layer, pattern)
            if reason and said is not None:
                raise SpecError(
                    f"layer {layer.name!r}", reason, "choose a divisor or skip the layer"
                )
        reasons[layer.name] = reason
        if not reason:
            patterns[layer.name] = pattern
    return Chosen(patterns, reasons)


def positions(layer: Layer) -> int:
    """Return how many weights connect one input channel with one output channel."""
    return prod(layer.shape[2:]) if layer.kind in ("Conv", "ConvTranspose") else 1


def input_channels(layer: Layer) -> int:
    """Return how many input channels an output channel sees."""
    return layer.columns // positions(layer)


def misfit(layer: Layer, pattern: Pattern) -> str:
    """Say why a layer cannot have a pattern; empty if it can."""
    channels = input_channels(layer)
    if not pattern.m or channels % pattern.m == 0:
        return ""
    if layer.groups > 1:
        amount = f"{channels} input channel" + ("s" if channels > 1 else "")
        return f"{amount} in each of its {layer.groups} groups: no multiple of {pattern.m}"
    kind = "channels" if positions(layer) > 1 else "columns"
    return f"{channels} input {kind} do not divide into groups of {pattern.m}"


def _in_subgraphs(carrier: Carrier) -> frozenset[str]:
    if Capability.GRAPH not in carrier.offers:
        return frozenset()
    own = carrier.graph().graph.initializers
    return frozenset(layer.name for layer in carrier.layers() if layer.weight not in own)


def _unlike_readers(carrier: Carrier) -> dict[str, str]:
    """Find weights that are summed over along more than one axis."""
    if Capability.GRAPH not in carrier.offers:
        return {}
    ways: dict[str, set[tuple[str, bool, int]]] = {}
    for layer, _ in layers_with_nodes(carrier.graph()):
        family = "linear" if layer.kind in ("Gemm", "MatMul") else layer.kind
        ways.setdefault(layer.name, set()).add((family, layer.transposed, layer.groups))
    reason = "its weight is shared by layers that read it along different axes"
    return {name: reason for name, found in ways.items() if len(found) > 1}
