"""``quantize-static`` prepares a model: channels are scaled, and statistics follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch

from compressor.graph.operators import operator
from compressor.graph.values import origin, value_by_name
from compressor.models.resident_memory import forget_pages
from compressor.passes.prepare.balance import NOTHING, Balance, Rounding, balance
from compressor.passes.prepare.proof import proved
from compressor.passes.prepare.scales import ScaleMap
from compressor.passes.quantize.maths.grids import kept_grids
from compressor.passes.quantize.static.replayed import Replay
from compressor.passes.quantize.static.settings import Decision
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, Scheme
from compressor.types.statistics import Moments, Range, Request


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model that is ready to be quantized."""

    carrier: Carrier
    statistics: Mapping[str, Any]  # of its values, by `Request.key`
    decision: Decision  # what is quantized in it
    balance: Balance = NOTHING


def schemes_of(decision: Decision) -> dict[str, Scheme]:
    """Return how weights are represented that become codes, computed with as such or not."""
    return {**decision.schemes, **decision.stored}


def rounding_of(decision: Decision) -> Rounding:
    """Return how finely values and weights are quantized."""
    symmetric = decision.settings.symmetric
    steps = {
        name: 2 ** decision.value_bits(name) - (2 if symmetric else 1)
        for name in decision.placement.values
        if name not in decision.placement.joined  # rounded once, as what it is joined to
    }
    return Rounding({name: (n, symmetric) for name, n in steps.items()}, schemes_of(decision))


def prepare(
    given: Prepared,
    scales: ScaleMap,
    decide: Callable[[ir.Model, Decision | None], Decision],
    moments: Callable[[Decision], Mapping[str, Sequence[Request]]],
    replay: Replay,
) -> Prepared:
    """Scale channels where that lowers the predicted error, and outputs stay what they are.

    What is known of layers' inputs changes with their channels. How far scaled values reach follows
    from what their channels did in all data; some samples say what part of that observers keep.

    Args:
        given: the model, and the statistics that were asked for.
        scales: what can be scaled.
        decide: returns what is quantized in a graph, which may copy another that was decided on.
        moments: returns the requests for second moments, by layer name: one a reader.
        replay: runs calibration samples again.
    """
    statistics, carrier = given.statistics, given.carrier
    groups = tuple(g for g in scales.groups if not any(_on_grid(carrier, r.layer) for r in g.reads))
    before = given.decision
    scaled = balance(carrier, replace(scales, groups=groups), rounding_of(before), statistics)
    after, scaled = proved(carrier, scaled, replay.samples)
    if not scaled.groups:
        return replace(given, balance=scaled)
    inserted = {s.group.reads[0].value for s in scaled.groups if s.group.inserted}
    decision = decide(after.graph(), None if inserted else before)
    if twice := _rounded(inserted, after.graph(), decision):
        once = (g for g in groups if not (g.inserted and g.reads[0].value in twice))
        return prepare(given, replace(scales, groups=tuple(once)), decide, moments, replay)
    known = dict(statistics)
    _forget(carrier.graph(), scaled.weights)
    old, new = moments(before), moments(decision)
    for layer, columns in scaled.columns.items():
        for earlier, later in zip(old.get(layer, ()), new.get(layer, ()), strict=False):
            observed = statistics.get(earlier.key)
            if isinstance(observed, Moments):
                known[later.key] = observed.divided(columns)
    names = dict(scaled.renamed)
    missing = {request.key: request for request in decision.requests() if request.key not in known}
    changed = [
        (request, earlier)
        for name in decision.placement.values
        if name in names
        for request, earlier in zip(
            decision.range_requests(name), before.range_requests(names[name]), strict=True
        )
    ]
    wanted = {**missing, **{r.key: r for r, _ in changed if r.key in known}}
    reaching = {
        request.key
        for request, earlier in changed
        if request.tensor in scaled.reach and statistics.get(earlier.key) is not None
    }
    sampled = replay.of(after, decision, known).ranges(reaching) if reaching else {}
    known.update(sampled)
    rest = [request for key, request in wanted.items() if key not in sampled]
    if rest:
        known.update(replay.collect(after, rest))
    for request, earlier in changed:
        if request.key in reaching:
            first, reach = statistics[earlier.key], scaled.reach[request.tensor]
            known[request.key] = _widened(first, known[request.key], *reach)
    return Prepared(after, known, decision, scaled)


def _forget(model: ir.Model, names: Iterable[str]) -> None:
    """Take pages of files that weights lie in out of this process: others took their place."""
    weights = model.graph.initializers
    tensors = (weights[name].const_value for name in names if name in weights)
    forget_pages(t.numpy() for t in tensors if isinstance(t, ir.ExternalTensor))


def _rounded(names: Collection[str], model: ir.Model, decision: Decision) -> set[str]:
    """Return the values in front of inserted nodes that are rounded all the same.

    A convolution of integers rounds what it writes. Behind the node, that would be rounded again.
    """
    values, rounded = value_by_name(model), set(decision.placement.values)
    starts = {name: origin(values[name], lambda node: bool(operator(node).moves)) for name in names}
    return {name for name, start in starts.items() if start.name in rounded}


def _on_grid(carrier: Carrier, layer: Layer) -> bool:
    """Whether a weight was quantized before, so that its codes are kept; scaled, it has others."""
    matrix = layer.canonical(carrier.weight(layer)).to(torch.float32)
    return bool((kept_grids(matrix, torch.zeros(layer.rows, 1), Scheme(8)) > 0).any())


def _widened(before: Range, found: Range, seen: Range, reach: Range) -> Range:
    """Return the range of a scaled value that holds what later samples are expected to be.

    Scaled channels all use the range, so that any of them leaves it as soon as a later sample goes
    further than the calibration's; before, only the largest did. The share of what was seen that
    the observer left out stays outside.
    """

    def end(before: float, found: float, seen: float, reach: float) -> float:
        share = min(before / seen, 1.0) if seen else 0.0
        return share * reach if abs(share * reach) > abs(found) else found

    return Range(
        end(before.low, found.low, seen.low, reach.low),
        end(before.high, found.high, seen.high, reach.high),
    )
