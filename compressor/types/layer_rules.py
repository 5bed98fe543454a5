"""Per-layer rules of a pass: which layers they refer to, and what that makes of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from typing import TypeVar, get_args

from compressor.errors import SpecError, suggestion
from compressor.types.layers import Layer
from compressor.types.passes import LayerPlan, LayerRule, Pass

RuleT = TypeVar("RuleT", bound=LayerRule)
_SHOWN = 3
NO_LAYER = "touches no layer"
SKIPPED = "skipped by"
"""Begins the reason why a pass leaves a layer that a rule skips."""
TO_SINGLE = (
    "put {pass: cast, dtype: fp32} before it, or save the model in float32, as by model.float(), "
    "and give that"
)
TOO_WIDE = ", wider than float32"
"""How a reason ends whose remedy is :data:`TO_SINGLE`."""
TO_FLOATS = "{pass: cast, dtype: fp32} (which makes a quantized model one of floats)"
"""What a spec for a model that is quantized already begins with."""


def resolve_rules(
    rules: Sequence[RuleT], layers: Sequence[Layer] | Sequence[str]
) -> dict[str, RuleT | None]:
    """Find each layer's rule: the first that matches its name.

    One that matches no name of a layer may match those of weights or nodes.

    Args:
        rules: in order.
        layers: the layers, or their names alone.

    Example:
        >>> resolve_rules([LayerRule(match="conv*", skip=True)], ["conv1", "fc"])
        {'conv1': LayerRule(match='conv*', skip=True), 'fc': None}

    Raises:
        SpecError: a rule matches no layer at all.
    """
    names = [layer if isinstance(layer, str) else layer.name for layer in layers]
    rules = by_layer_name(rules, [layer for layer in layers if isinstance(layer, Layer)])
    for rule in rules:
        if not any(fnmatchcase(name, rule.match) for name in names):
            raise SpecError(
                f"layer rule {rule.match!r}", "matches no layer", suggestion(rule.match, names)
            )
    return {name: rule_of(rules, name) for name in names}


def by_layer_name(rules: Sequence[RuleT], layers: Sequence[Layer]) -> list[RuleT]:
    """Return rules by the names of layers, where they match weights or nodes and no layer's name.

    A rule by name means the same whatever a graph calls its nodes.
    """
    named: list[RuleT] = []
    for rule in rules:
        matched = []
        if not any(fnmatchcase(layer.name, rule.match) for layer in layers):
            others = ((layer, name) for layer in layers for name in (layer.weight, layer.node))
            matched = [layer.name for layer, name in others if fnmatchcase(name, rule.match)]
        names = dict.fromkeys(matched)
        named += [rule.model_copy(update={"match": match_of(name)}) for name in names] or [rule]
    return named


def skip_reasons(rules: Sequence[LayerRule], layers: Sequence[Layer]) -> dict[str, str]:
    """Return for each layer that a rule skips it; raises as :func:`resolve_rules` does."""
    resolved = resolve_rules(rules, layers)
    return {name: skip_reason(rule) for name, rule in resolved.items()}


def rule_of(rules: Sequence[RuleT], name: str) -> RuleT | None:
    """Return the first rule that matches a layer's name, if any does."""
    return next((rule for rule in rules if fnmatchcase(name, rule.match)), None)


def rule_class(declared: type[Pass]) -> type[LayerRule] | None:
    """Return what the rules under a pass's ``layers`` are, or ``None`` if it has no rules."""
    field = declared.model_fields.get("layers")
    given = () if field is None else get_args(field.annotation)
    declared_class = given[0] if given else None
    return (
        declared_class
        if isinstance(declared_class, type) and issubclass(declared_class, LayerRule)
        else None
    )


def match_of(name: str) -> str:
    """Return the ``match`` that fits this layer's name and no other."""
    return escape(name)


def skip_reason(rule: LayerRule | None) -> str:
    """Return that a rule skips its layer as the reason; empty if it does not."""
    return f"{SKIPPED} the rule {rule.match!r}" if rule is not None and rule.skip else ""


def unfit_type(dtype: str) -> str:
    """Return that the type of a layer's weight is why it is kept, for types a pass does not take.

    >>> unfit_type("int8")
    'its weight is int8 already'
    """
    return f"its weight is {dtype}{TOO_WIDE if dtype == 'float64' else ' already'}"


def plan_layers(
    name: str,
    actions: Mapping[str, str],
    reasons: Mapping[str, str],
    *,
    quantized: bool = False,
) -> tuple[LayerPlan, ...]:
    """Return the plan's rows; a pass that would do nothing is an error.

    Args:
        name: the pass.
        actions: what happens to each layer that is not kept.
        reasons: for every layer, in order, why it is kept; empty where it is not.
        quantized: the model is quantized, which may be why all are kept.

    Raises:
        SpecError: every layer is kept.
    """
    rows = tuple(
        LayerPlan(layer, "keep", reason, touched=False)
        if reason
        else LayerPlan(layer, actions[layer])
        for layer, reason in reasons.items()
    )
    if not any(row.touched for row in rows):
        counted = Counter(reasons.values()).most_common(_SHOWN)
        shown = "; ".join(f"{n} of {len(rows)}: {reason}" for reason, n in counted)
        problem, remedy = f"{NO_LAYER}: {shown}", "change its rules or options, or remove it"
        if counted and counted[0][0].endswith(TOO_WIDE):
            remedy = TO_SINGLE
        if not rows:
            problem = f"{NO_LAYER}: the model has none with weights"
            remedy = "remove it; fuse and the exports work without any"
        if quantized:
            problem += "" if rows else " in floating point"
            remedy = f"change its rules or options, remove it, or put {TO_FLOATS} before it"
        raise SpecError(f"pass {name!r}", problem, remedy)
    return rows
