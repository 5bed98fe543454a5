"""The candidate's latency over the base's, from what the two runs measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressor.comparison.opened_run import FLOAT
from compressor.comparison.sides import Side

_MACHINE = ("processor", "cores", "system")
_ALONE = {"value": 1.0, "ci95": [1.0, 1.0]}


@dataclass(frozen=True)
class LatencyRatio:
    """The candidate's latency over the base's.

    Attributes:
        value: the ratio; ``None`` where it was not measured.
        ci95: its 95 % interval.
        batch: samples in a run.
        p50: medians of base and candidate in milliseconds, as far as they were measured.
        source: how it was measured, or why it was not.
    """

    value: float | None
    ci95: tuple[float, float] | None
    batch: int | None
    p50: tuple[float | None, float | None]
    source: str


def not_judged(base: Side, candidate: Side) -> str:
    """Say why the two latencies are not compared; empty where they may be."""
    for side in (base, candidate):
        if side.name != FLOAT and not side.entry["deployed"]:
            reason = side.entry.get("latency_ratio_reason") or "a storage format"
            return f"{side.name} is not judged by its latency: {reason}"
    return ""


def stored_ratio(base: Side, candidate: Side) -> LatencyRatio:
    """Divide the ratios that each run measured against the float model, which was its neighbour.

    The relative errors of the two add up as independent ones do. What differs between two runs on
    one machine is in neither interval.
    """
    reason = not_judged(base, candidate) or _unlike(base, candidate)
    ours, theirs = _by_batch(base), _by_batch(candidate)
    shared = [batch for batch in theirs if batch in ours]
    if not reason and not shared:
        reason = "the two runs have timed no common batch size"
    if not shared:
        return LatencyRatio(None, None, None, (None, None), reason)
    batch = min(shared)
    (base_ratio, base_p50), (own_ratio, own_p50) = ours[batch], theirs[batch]
    if reason:
        return LatencyRatio(None, None, batch, (base_p50, own_p50), reason)
    value, interval = _quotient(own_ratio, base_ratio)
    together = base.run.folder.resolve() == candidate.run.folder.resolve()
    source = "from two runs, each timed beside the float model"
    source = "as their run timed both" if together else source
    return LatencyRatio(value, interval, batch, (base_p50, own_p50), source)


def _unlike(base: Side, candidate: Side) -> str:
    """Say why two runs' ratios have nothing in common; empty where they have."""
    ours, theirs = base.run.report, candidate.run.report
    if ours["identity"]["model"] != theirs["identity"]["model"]:
        return "the two runs have other float models"
    if any(ours["environment"][key] != theirs["environment"][key] for key in _MACHINE):
        return "the two runs were timed on different machines"
    return ""


def _quotient(
    above: Mapping[str, Any], below: Mapping[str, Any]
) -> tuple[float, tuple[float, float]]:
    """Divide two ratios with intervals; in logarithms, distances to the ends add in squares."""
    (top, (top_low, top_high)), (base, (base_low, base_high)) = (
        (math.log(r["value"]), tuple(math.log(b) for b in r["ci95"])) for r in (above, below)
    )
    middle = top - base
    low = middle - math.hypot(top - top_low, base_high - base)
    high = middle + math.hypot(top_high - top, base - base_low)
    return math.exp(middle), (math.exp(low), math.exp(high))


def _by_batch(side: Side) -> dict[int, tuple[Mapping[str, Any], float]]:
    """Return the ratio to the float model, and the median in milliseconds, by batch size."""
    rows = side.entry["latency"]
    if side.name == FLOAT:
        return {int(row["batch"]): (_ALONE, float(row["p50"])) for row in rows}
    return {int(row["batch"]): (row["ratio"], float(row["artifact"]["p50"])) for row in rows}
