"""What ``prune-structured`` is asked to remove, and which groups of channels can go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from pydantic import Field

from compressor.errors import SpecError, listed
from compressor.graph.costs import parameters
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.criteria import Tensors, allowed_counts, unit_step
from compressor.passes.prune.structured.blocks import in_blocks
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap, Flags, Units, kept
from compressor.types.layer_rules import SKIPPED, resolve_rules, rule_of, skip_reason
from compressor.types.layers import Layer
from compressor.types.options import OneOf
from compressor.types.passes import LayerOutcome, LayerRule, PassContext

_LAYOUT = "compressed-tensors"
_LEAST, _STEPS = "minimum", "round-to"  # options that say how many units remain

Criterion: TypeAlias = Literal[
    "l2",
    "l1",
    "batch-norm",
    "taylor",
    "activation",
    "reconstruction",
    "principal-components",
    "random",
]
Scope: TypeAlias = Literal["global", "local", "sensitivity"]
Minimum: TypeAlias = Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)]


class Target(OneOf):
    """How much is to be removed, or to remain; exactly one of them."""

    ratio: float | None = Field(
        default=None, gt=0, lt=1, description="share of each group's units that is removed"
    )
    macs: float | None = Field(
        default=None, gt=0, le=1, description="multiply-accumulates that remain, as a share"
    )
    parameters: float | None = Field(
        default=None, gt=0, le=1, description="weights that remain, as a share"
    )
    latency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="time of one sample (of a batch, if the model's is fixed) that remains, as a "
        "share; widths and dropped blocks are chosen by times measured on this machine",
    )

    @property
    def key(self) -> str:
        """The option's key in a spec, such as ``target.macs``."""
        return f"target.{self.kind}"

    @property
    def ranked(self) -> bool:
        """Whether it is reached by a prefix of a ranking of all channels."""
        return self.kind in ("macs", "parameters")

    def check(self, scope: Scope | None) -> None:
        """Check that it is spread over groups, if it is said how.

        Raises:
            SpecError: it is not.
        """
        if scope is not None and self.kind == "ratio":
            raise SpecError(
                "scope",
                f"is {scope}, but a ratio applies to each group by itself",
                "remove scope, or set target macs, parameters or latency",
            )


class StructuredRule(LayerRule):
    """Per-layer settings of ``prune-structured``, for all channels that a layer writes."""

    ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="share of these layers' channels that is removed, whatever the target is",
    )


@dataclass(frozen=True, eq=False)
class Prunable:
    """A group that can lose units."""

    group: ChannelGroup
    remaining: Units  # how many may remain, ascending; the last is all of them
    free: Units  # the same, where convolutions need not compute in blocks
    ratio: float | None  # the share that a layer's rule removes
    step: int  # units go in multiples of it


@dataclass(frozen=True, eq=False)
class Choice:
    """The groups of a model, sorted by whether they can be pruned."""

    channels: ChannelMap
    prunable: tuple[Prunable, ...]  # those that can
    # for each layer by name, the numbers of the groups that lie on its output
    writers: Mapping[str, tuple[int, ...]]
    reasons: Mapping[int, str]  # why groups cannot, by their number
    ruled: frozenset[str] = frozenset()  # layers that a rule keeps, or takes a share of

    def unnamed(self, planned: Flags | None) -> dict[str, str]:
        """Return what happens to groups that can be pruned and no layer writes, by their names.

        A recurrent node has no layers before ``fuse`` where its weights are stacked from several
        parameters, or computed from them.

        Args:
            planned: the units that go, if that is known.
        """
        written = {index for indices in self.writers.values() for index in indices}
        named = {id(self.channels.groups[index]) for index in written}
        actions: dict[str, str] = {}
        for group in (p.group for p in self.prunable if id(p.group) not in named):
            all_units = len(group.units)
            left = all_units - (0 if planned is None else int(planned[group.units].sum()))
            actions[group.name] = (
                f"{left} of {all_units} channels" if planned is not None else "prune"
            )
        return actions

    def more(self) -> list[str]:
        """Return what of the options would let more units go than may now."""
        kept = tuple(self.reasons.values())
        free = [p for p in self.prunable if p.ratio is None]
        ways = {
            f"lower {_LEAST}": any(p.free[0] > p.step for p in free)
            or any(reason.startswith(_LEAST) for reason in kept),
            f"lower {_STEPS}": any(p.step > 1 for p in free)
            or any(reason.startswith(_STEPS) for reason in kept),
            "skip fewer layers": any(reason.startswith(SKIPPED) for reason in kept),
            "raise the ratios of its rules": len(free) < len(self.prunable),
            "choose another criterion": any("criterion" in reason for reason in kept),
        }
        return [way for way, helps in ways.items() if helps]

    def kept_reason(self, layer: Layer) -> str:
        """Return why a layer keeps all of its output channels; empty if it need not."""
        groups = self.writers.get(layer.name, ())
        if not groups:
            return "none of its output channels can be removed"
        if any(index not in self.reasons for index in groups):
            return ""
        return self.reasons[groups[0]]


def choose(
    channels: ChannelMap,
    layers: Sequence[Layer],
    rules: Sequence[StructuredRule],
    criterion: Criterion | None,
    minimum: Minimum,
    round_to: int,
    readers: Collection[str] = (),
) -> Choice:
    """Find what may be removed; a rule that skips a layer protects all channels that it writes.

    It also protects those of parameters that it matches and that are no layer's weight, such as the
    queries, keys and values that PyTorch's attention holds in one.

    Args:
        readers: weights of layers that are to compute in blocks of channels if they do now.

    Raises:
        SpecError: a rule matches no layer.
    """
    layer_rules = resolve_rules(rules, layers)
    writers = _writers(channels, layers)
    by_group: dict[int, list[StructuredRule]] = defaultdict(list)
    for name, groups in writers.items():
        rule = layer_rules[name]
        if rule is not None:
            for index in groups:
                by_group[index].append(rule)
    named = {layer.weight for layer in layers}
    for index, group in enumerate(channels.groups):
        for parameter in {m.parameter for m in group.members if m.role == "output"} - named:
            rule = rule_of(rules, parameter)
            by_group[index] += [] if rule is None else [rule]
    prunable: list[Prunable] = []
    reasons: dict[int, str] = {}
    for index, group in enumerate(channels.groups):
        group_rules = by_group.get(index, [])
        skipped = next((skip_reason(rule) for rule in group_rules if rule.skip), "")
        step = unit_step(channels, group, round_to)
        free = allowed_counts(len(group.units), step, minimum)
        counts = in_blocks(channels, group, free, readers)
        reason = group.frozen or skipped or _unranked(channels, group, criterion)
        if not reason and len(counts) == 1:
            size = len(group.units)
            limit = f"{_STEPS} {round_to}" if size <= step > 1 else f"{_LEAST} {minimum}"
            reason = f"{limit} leaves its {size} channels whole"
        if reason:
            reasons[index] = reason
            continue
        ratios = [rule.ratio for rule in group_rules if rule.ratio is not None]
        prunable.append(Prunable(group, counts, free, min(ratios, default=None), step))
    ruled = frozenset(
        name for name, r in layer_rules.items() if r is not None and (r.skip or r.ratio is not None)
    )
    return Choice(channels, tuple(prunable), writers, reasons, ruled)


def _writers(channels: ChannelMap, layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    """Return for each layer the groups whose units are its output channels."""
    by_weight: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(channels.groups):
        for name in dict.fromkeys(m.parameter for m in group.members if m.role == "output"):
            by_weight[name].append(index)
    return {x.name: tuple(by_weight[x.weight]) for x in layers if x.weight in by_weight}


def _unranked(channels: ChannelMap, group: ChannelGroup, criterion: Criterion | None) -> str:
    if criterion == "batch-norm" and not any(m.role == "norm-scale" for m in group.members):
        return "no normalization scales its channels, and criterion batch-norm ranks by that"
    if criterion == "activation" and not any(
        np.isin(a.units, group.units).any() for a in channels.activations
    ):
        return "none of its activations can be observed for criterion activation"
    return ""


def tensors_of(model: ir.Model, channels: ChannelMap) -> Tensors:
    """Return the sizes of a model's weights; running statistics are not counted."""
    statistics = {
        m.parameter
        for group in channels.groups
        for m in group.members
        if m.role in ("norm-mean", "norm-variance")
    }
    factors = []
    for name, axes in channels.parameters.items():
        value = model.graph.initializers[name]
        if name in statistics or value.dtype is None or not value.dtype.is_floating_point():
            continue
        assert value.shape is not None
        lengths = value.shape.numpy()
        constant = prod(n for n, axis in zip(lengths, axes, strict=True) if axis is None)
        factors.append((int(constant), tuple(a for a in axes if a is not None)))
    counted = sum(c * prod(len(a) for a in axes) for c, axes in factors)
    return Tensors(parameters(model) - counted, tuple(factors))


def layer_change(channels: ChannelMap, layer: Layer, removed: Flags) -> dict[str, tuple[int, int]]:
    """Return how many ``channels`` and ``inputs`` a layer has before and after, if any may go."""
    axes = channels.parameters.get(layer.weight, ())
    roles = {
        m.axis: m.role for g in channels.groups for m in g.members if m.parameter == layer.weight
    }
    names = {"output": "channels", "input": "inputs"}
    return {
        names[roles[index]]: (len(axis), int(kept(axis, removed).sum()))
        for index, axis in enumerate(axes)
        if axis is not None and roles.get(index) in names
    }


def outcomes(
    channels: ChannelMap,
    layers: Iterable[Layer],
    removed: Flags,
    details: Mapping[str, Mapping[str, Any]],
) -> tuple[LayerOutcome, ...]:
    """Return what became of layers that have lost something, or of which ``details`` are told."""
    done = []
    for layer in layers:
        change = layer_change(channels, layer, removed)
        changed = [(name, *sizes) for name, sizes in sorted(change.items()) if len(set(sizes)) > 1]
        facts: dict[str, Any] = {}
        for name, before, after in changed:
            facts |= {f"{name}_before": before, f"{name}_after": after}
        facts |= details.get(layer.name, {})
        if facts:
            sizes = [f"{after} of {before} {name}" for name, before, after in changed[:1]]
            scheme = ", ".join([layer.dtype, *sizes])
            done.append(LayerOutcome(layer.name, scheme, details=facts))
    return tuple(done)


def frozen_notes(channels: ChannelMap) -> tuple[str, ...]:
    """Return which operators keep channels from being removed, a sentence for each reason."""
    nodes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for stop in channels.frozen:
        if stop.op_type:  # that outputs stay is no surprise
            nodes[stop.op_type, stop.reason].append(stop.node)
    return tuple(
        f"{op_type} keeps channels from being removed: {reason} ({listed(names, 3)})"
        for (op_type, reason), names in nodes.items()
    )


def stated(carrier: Carrier, context: PassContext) -> bool:
    """Whether a configuration has to state what remains: that of a Hugging Face directory."""
    if _LAYOUT not in context.targets or not isinstance(carrier, TorchCarrier):
        return False
    return carrier.folder is not None and not carrier.executes_graph


def layout_notes(target: Target, carrier: Carrier, context: PassContext) -> tuple[str, ...]:
    """Return what an export that states sizes in a configuration will not take, in a sentence."""
    if target.kind != "latency" or not stated(carrier, context):
        return ()
    return (
        "with a target of latency layers of one kind may keep different numbers of channels, which "
        f"config.json cannot state, and the layout {_LAYOUT} is refused then: with a target of "
        "ratio, macs or parameters they keep the same",
    )
