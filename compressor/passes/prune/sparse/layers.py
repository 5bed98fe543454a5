"""Which layers can be pruned to a pattern, and why the others are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from compressor.errors import SpecError
from compressor.graph.layers import layers_with_nodes
from compressor.models.layer_uses import inner_layers, kept_tables, recurrences
from compressor.passes.prune.sparse.patterns import Pattern
from compressor.run.weight_pass import FLOATS, Treatment
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import RuleT, resolve_rules, skip_reason
from compressor.types.layers import Layer


def choose_layers(
    carrier: Carrier,
    everywhere: Pattern,
    rules: Sequence[RuleT],
    of_rule: Callable[[RuleT], Pattern | None],
) -> dict[str, Treatment]:
    """Return the pattern of each layer, or why it is kept, by layer name.

    Args:
        carrier: the model.
        everywhere: the pattern of layers for which no rule gives another.
        rules: for single layers; the first that matches wins.
        of_rule: returns the pattern that a rule gives; a layer that cannot have it is an error.

    Raises:
        SpecError: a rule matches no layer, or gives one a pattern that does not fit it.
    """
    by_layer = resolve_rules(rules, carrier.layers())
    kept = {**inner_layers(carrier), **_unlike_readers(carrier), **kept_tables(carrier)}
    kept |= recurrences(carrier)
    treatments = {}
    for layer in carrier.layers():
        rule = by_layer[layer.name]
        ruled = None if rule is None else of_rule(rule)
        pattern = ruled or everywhere
        reason = skip_reason(rule) or kept.get(layer.name, "")
        if not reason and layer.dtype not in FLOATS:
            reason = f"its weight is {layer.dtype}"
        if not reason:
            reason = misfit(layer, pattern)
            if reason and ruled is not None:
                raise SpecError(
                    f"layer {layer.name!r}", reason, "choose a divisor or skip the layer"
                )
        treatments[layer.name] = Treatment(str(pattern), kept=reason, setting=pattern)
    return treatments


def positions(layer: Layer) -> int:
    """Return how many weights connect one input channel with one output channel."""
    return prod(layer.shape[2:]) if layer.is_convolution else 1


def input_channels(layer: Layer) -> int:
    """Return how many input channels an output channel sees."""
    return layer.columns // positions(layer)


def misfit(layer: Layer, pattern: Pattern) -> str:
    """Return why a layer cannot have a pattern; empty if it can."""
    channels = input_channels(layer)
    if not pattern.m or channels % pattern.m == 0:
        return ""
    if layer.groups > 1:
        amount = f"{channels} input channel" + ("s" if channels > 1 else "")
        return f"{amount} in each of its {layer.groups} groups: no multiple of {pattern.m}"
    kind = "channels" if positions(layer) > 1 else "columns"
    return f"{channels} input {kind} do not divide into groups of {pattern.m}"


def _unlike_readers(carrier: Carrier) -> dict[str, str]:
    """Find weights that are summed over along more than one axis."""
    if Capability.GRAPH not in carrier.offers:
        return {}
    ways: dict[str, set[tuple[str, bool, int]]] = {}
    for layer, _ in layers_with_nodes(carrier.graph()):
        family = "linear" if layer.is_linear else layer.kind
        ways.setdefault(layer.name, set()).add((family, layer.transposed, layer.groups))
    reason = "its weight is shared by layers that read it along different axes"
    return {name: reason for name, readers in ways.items() if len(readers) > 1}
