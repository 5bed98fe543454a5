"""The gate: hold a comparison against limits.

A metric fails its limit where two things are true: the loss is real (equally good models would
lose so much with a chance below ``alpha``), and as measured it is over the limit. So noise alone
fails a build at most in ``alpha`` of all cases, whatever the limit is, and a real loss is not
excused because its interval also reaches below the limit. Where the evidence does not suffice the
verdict is unknown, which fails only a strict gate: that asks for evidence that the loss lies
within the limit, as a test of non-inferiority does. Without a limit, every real loss fails, and
evidence is held against the limit that runs have by default.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from compressor import catalog
from compressor.errors import DataError
from compressor.lab.compare.compare import Comparison
from compressor.report import formats
from compressor.run.verdicts.data_doubts import check_limit
from compressor.run.verdicts.statistics import Difference
from compressor.run.verdicts.verdicts import DEFAULT_SHARE, WIDEST_RATIO, Verdict, verdict_of


@dataclass(frozen=True)
class GateLimits:
    """The limits that the candidate must keep.

    Attributes:
        metric_drop: greatest drop of the metric, in points where it is a share; ``None``: none
            that is real, and evidence that less than a point or 1 % is lost.
        latency_ratio: greatest latency over the base's; ``None`` for no limit.
        size_ratio: greatest size over the base's; ``None`` for no limit.
        alpha: level of the metric's test, one-sided.
        strict: what is unknown fails.
    """

    metric_drop: float | None = None
    latency_ratio: float | None = None
    size_ratio: float | None = None
    alpha: float = 0.05
    strict: bool = False


@dataclass(frozen=True)
class Check:
    """One limit and its verdict.

    Attributes:
        name: ``metric-drop``, ``latency-ratio`` or ``size-ratio``.
        limit: the limit, where one was given.
        ci95: its 95 % interval, where it has one.
    """

    name: str
    limit: float | None
    measured: float
    ci95: tuple[float, float] | None
    verdict: Verdict
    ok: bool
    text: str


@dataclass(frozen=True)
class GateResult:
    """What the gate decided."""

    comparison: Comparison
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """The candidate passes."""
        return all(check.ok for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        """What all checks say together."""
        if not self.ok:
            return "failed"
        return "unknown" if any(c.verdict == "unknown" for c in self.checks) else "passed"

    def as_json(self) -> dict[str, Any]:
        """Return decision and comparison as JSON values."""
        checks = [asdict(check) for check in self.checks]
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "checks": checks,
            **self.comparison.as_json(),
        }


def judge(comparison: Comparison, limits: GateLimits) -> GateResult:
    """Hold a comparison against limits.

    Raises:
        DataError: what a limit is about was not measured, or nothing can be judged.
        SpecError: no candidate can break the limit of the metric.
    """
    checks: list[Check] = []
    if comparison.difference is not None:
        checks.append(_metric(comparison, comparison.difference, limits))
    elif limits.metric_drop is not None:
        _refuse("--max-metric-drop", comparison.difference_reason)
    if limits.latency_ratio is not None:
        checks.append(_latency(comparison, limits.latency_ratio, strict=limits.strict))
    if limits.size_ratio is not None:
        ok = comparison.size_ratio <= limits.size_ratio
        sizes = " over ".join(
            formats.size(s.bytes) for s in (comparison.candidate, comparison.base)
        )
        ratio, _ = formats.compared(comparison.size_ratio, limits.size_ratio)
        text = f"{sizes}, {ratio} ×: {'within' if ok else 'fails'} the limit {limits.size_ratio:g}"
        verdict: Verdict = "passed" if ok else "failed"
        checks.append(
            Check("size-ratio", limits.size_ratio, comparison.size_ratio, None, verdict, ok, text)
        )
    if not checks:
        _refuse("gate", comparison.difference_reason)
    return GateResult(comparison, tuple(checks))


def _metric(comparison: Comparison, difference: Difference, limits: GateLimits) -> Check:
    limit, alpha = limits.metric_drop, limits.alpha
    real = difference.drop > 0 and difference.p < alpha
    metric = comparison.base.metric
    assert metric is not None  # there is a difference
    if metric["name"] in catalog.names("metric"):
        check_limit(limit, catalog.load("metric", metric["name"]), "option --max-metric-drop")
    share = formats.is_share(metric)
    usual = 1.0 if share else DEFAULT_SHARE * abs(metric["value"])
    allowed = usual if limit is None else limit
    over = difference.drop > allowed
    copied = difference.equal and _same_file(comparison)
    same = copied or (difference.equal and not usual and limit is None)
    verdict: Verdict = "unknown"
    if real and (over or limit is None):
        verdict = "failed"
    elif not over and (same or difference.within_p(allowed) < alpha):
        verdict = "passed"
    ok = verdict == "passed" or (verdict == "unknown" and not limits.strict)
    text = _metric_words(difference, share, limits, verdict, allowed)
    if copied and verdict == "passed":
        text = f"{drop_words(difference, share=share)}: the same bytes as the base"
    return Check("metric-drop", limit, difference.drop, difference.ci95, verdict, ok, text)


def _same_file(comparison: Comparison) -> bool:
    """Return whether both artifacts are the same bytes, so that nothing is left to prove."""
    base, candidate = (
        [file.get("sha256") for file in side.entry.get("files", ())]
        for side in (comparison.base, comparison.candidate)
    )
    return bool(base) and all(base) and base == candidate


def _latency(comparison: Comparison, limit: float, *, strict: bool) -> Check:
    latency = comparison.latency
    if latency.value is None or latency.ci95 is None:
        _refuse("--max-latency-ratio", latency.source)
    verdict = verdict_of(latency.ci95, limit, WIDEST_RATIO)
    ok = verdict == "passed" or (verdict == "unknown" and not strict)
    end = {
        "passed": f"within the limit {limit:g}",
        "failed": f"fails the limit {limit:g}",
        "unknown": f"not distinguishable from the limit {limit:g}",
    }[verdict]
    interval = formats.ratio_interval(latency.ci95)
    shown = f"{formats.ratio(latency.value)}, 95 % interval {interval}"
    text = f"{shown} at batch {latency.batch}, {latency.source}: {end}"
    return Check("latency-ratio", limit, latency.value, latency.ci95, verdict, ok, text)


def _refuse(subject: str, reason: str) -> NoReturn:
    raise DataError(subject, f"has nothing to judge ({reason})", "see the two runs' reports")


def _metric_words(
    difference: Difference, share: bool, limits: GateLimits, verdict: Verdict, allowed: float
) -> str:
    limit = limits.metric_drop
    shown = drop_words(difference, share=share)
    loss = formats.metric_change(allowed, share=share)
    if verdict == "passed":
        if limit is None:
            return f"{shown}: a loss of {loss} is excluded" if difference.drop > 0 else shown
        one_sided = difference.ci95[1] > limit  # the interval is of a test with two sides
        chance = f" (one-sided {probability(difference.within_p(limit))})" if one_sided else ""
        return f"{shown}: within the limit {limit:g}{chance}"
    if verdict == "failed":
        real = "the loss is real" if limit is None else f"fails the limit {limit:g}"
        return f"{shown}: {real}"
    samples = formats.plural(difference.samples, "sample")
    over = difference.drop > allowed
    needed = difference.samples_needed(limits.alpha, 0.0 if over else allowed)
    would = "" if needed is None else f"; {formats.count(needed)} would do"
    if over:
        return f"{shown}: not distinguishable with {samples}{would}"
    if limit is None:
        return f"{shown}: a loss below {loss} is not proved with {samples}{would}"
    return f"{shown}: within the limit {limit:g} as measured, not proved with {samples}{would}"


def drop_words(difference: Difference, *, share: bool) -> str:
    """Return how much worse or better the candidate is, with interval and chance."""
    if difference.equal:
        return f"the same on all {formats.plural(difference.samples, 'sample')}"
    size, interval, worse = loss_words(difference.drop, difference.ci95, share=share)
    amount = f"{'worse' if worse else 'better'} by {size}" if difference.drop else "no difference"
    chance = f" ({probability(difference.p)})" if worse else ""
    return f"{amount}, 95 % interval {interval}{chance}"


def loss_words(drop: float, ci95: tuple[float, float], *, share: bool) -> tuple[str, str, bool]:
    """Return the size of a drop or a gain, its interval, and whether it is a drop."""
    worse = drop >= 0
    bounds = ci95 if worse else (-ci95[1], -ci95[0])
    size = formats.metric_change(abs(drop), share=share)
    return size, formats.metric_change_interval(bounds, share=share), worse


def probability(p: float) -> str:
    """Format a chance."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
