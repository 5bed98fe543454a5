"""What the gate found, in words."""

from __future__ import annotations

from typing import Literal

from compressor.comparison.compare import Comparison
from compressor.comparison.difference import Difference
from compressor.comparison.latency_ratio import LatencyRatio
from compressor.report import formats

Status = Literal["passed", "failed", "undecided"]


def metric(
    difference: Difference, share: bool, limit: float | None, alpha: float, status: Status
) -> str:
    """Say what the metric's check came to.

    Args:
        difference: how much worse the candidate is.
        share: the metric is in percent, so that differences are points.
        limit: the greatest drop that is allowed, if one was given.
        alpha: level of the test.
        status: what was decided.
    """
    shown = drop(difference, share=share)
    if status == "passed":
        return f"{shown}: within the limit {limit:g}" if limit is not None else shown
    if status == "failed":
        return f"{shown}: " + (
            "the loss is real" if limit is None else f"fails the limit {limit:g}"
        )
    samples = formats.plural(difference.samples, "sample")
    if difference.drop > (limit or 0.0):
        return f"{shown}: not distinguishable with {samples}{_would_do(difference, alpha, 0.0)}"
    assert limit is not None
    would = _would_do(difference, alpha, limit)
    return f"{shown}: within the limit {limit:g} as measured, not proved with {samples}{would}"


def drop(difference: Difference, *, share: bool) -> str:
    """Say how much worse or better the candidate is, with interval and chance."""
    if difference.equal:
        return f"the same on all {formats.plural(difference.samples, 'sample')}"
    worse = difference.drop >= 0
    size = formats.metric_change(abs(difference.drop), share=share)
    low, high = difference.ci95 if worse else (-difference.ci95[1], -difference.ci95[0])
    amount = f"{'worse' if worse else 'better'} by {size}" if difference.drop else "no difference"
    chance = f" ({probability(difference.p)})" if worse else ""
    return f"{amount}, 95 % interval {interval(low, high, share=share)}{chance}"


def interval(low: float, high: float, *, share: bool) -> str:
    """Format the ends of an interval of drops."""
    ends = [formats.metric_change(end, share=share).removesuffix(" points") for end in (low, high)]
    return " to ".join(ends)


def probability(p: float) -> str:
    """Format the chance of so large a loss between equal models."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def latency(ratio: LatencyRatio, limit: float, status: Status) -> str:
    """Say what the latency's check came to."""
    assert ratio.value is not None
    assert ratio.ci95 is not None
    shown = f"{formats.ratio(ratio.value)}, 95 % interval {formats.ratio_interval(ratio.ci95)}"
    ends = {
        "passed": f"within the limit {limit:g}",
        "failed": f"fails the limit {limit:g}",
        "undecided": f"not distinguishable from the limit {limit:g}",
    }
    return f"{shown} at batch {ratio.batch}, {ratio.source}: {ends[status]}"


def size(comparison: Comparison, limit: float, *, ok: bool) -> str:
    """Say what the size's check came to."""
    sizes = " over ".join(formats.size(s.bytes) for s in (comparison.candidate, comparison.base))
    end = f"within the limit {limit:g}" if ok else f"fails the limit {limit:g}"
    ratio, _ = formats.compared(comparison.size_ratio, limit)
    return f"{sizes}, {ratio} ×: {end}"


def _would_do(difference: Difference, alpha: float, limit: float) -> str:
    needed = difference.samples_needed(alpha, limit)
    return "" if needed is None else f"; {formats.count(needed)} would do"
