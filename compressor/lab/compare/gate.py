"""The gate: what a comparison shows, held against limits.

A metric fails its limit where two things are true: the loss is real (equally good models would
lose so much with a chance below ``alpha``), and as measured it is over the limit. So noise alone
fails a build at most in ``alpha`` of all cases, whatever the limit is, and a real loss is not
excused because its interval also reaches below the limit. Where the evidence does not suffice the
check is undecided, which fails only a strict gate: that asks for evidence that the loss lies
within the limit, as a test of non-inferiority does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from compressor.errors import DataError, SpecError
from compressor.lab.compare import texts
from compressor.lab.compare.compare import Comparison
from compressor.lab.compare.difference import Difference
from compressor.lab.compare.texts import Status
from compressor.report import formats


@dataclass(frozen=True)
class GateLimits:
    """What the candidate is held against.

    Attributes:
        metric_drop: greatest drop of the metric, in points where it is a share; ``None``: none
            that is real.
        latency_ratio: greatest latency over the base's; ``None`` for no limit.
        size_ratio: greatest size over the base's; ``None`` for no limit.
        alpha: level of the metric's test, one-sided.
        strict: what is undecided fails.
    """

    metric_drop: float | None = None
    latency_ratio: float | None = None
    size_ratio: float | None = None
    alpha: float = 0.05
    strict: bool = False


@dataclass(frozen=True)
class Check:
    """One limit and what came of it.

    Attributes:
        name: ``metric-drop``, ``latency-ratio`` or ``size-ratio``.
        limit: the limit, where one was given.
        measured: the drop or the ratio.
        ci95: its 95 % interval, where it has one.
        status: what the evidence says.
        ok: the gate lets it pass.
        text: the same in words.
    """

    name: str
    limit: float | None
    measured: float
    ci95: tuple[float, float] | None
    status: Status
    ok: bool
    text: str


@dataclass(frozen=True)
class GateResult:
    """What the gate decided.

    Attributes:
        comparison: what it decided on.
        checks: one for each limit.
    """

    comparison: Comparison
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """The candidate passes."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return decision and comparison as JSON values."""
        checks = [
            {
                "name": check.name,
                "limit": check.limit,
                "measured": check.measured,
                "ci95": None if check.ci95 is None else list(check.ci95),
                "status": check.status,
                "ok": check.ok,
                "text": check.text,
            }
            for check in self.checks
        ]
        return {"ok": self.ok, "checks": checks, **self.comparison.as_json()}


def check_limits(limits: GateLimits) -> None:
    """Refuse limits that ask for nothing.

    Raises:
        SpecError: strictness has no limit to hold to.
    """
    if limits.strict and limits.metric_drop is None and limits.latency_ratio is None:
        raise SpecError(
            "--strict",
            "asks for evidence that limits hold, and none is given",
            "add --max-metric-drop or --max-latency-ratio",
        )


def judge(comparison: Comparison, limits: GateLimits) -> GateResult:
    """Hold a comparison against limits.

    Raises:
        SpecError: as :func:`check_limits`.
        DataError: what a limit is about was not measured, or nothing can be judged.
    """
    check_limits(limits)
    checks: list[Check] = []
    if comparison.difference is not None:
        checks.append(_metric(comparison, comparison.difference, limits))
    elif limits.metric_drop is not None:
        _refuse("--max-metric-drop", comparison.difference_reason)
    if limits.latency_ratio is not None:
        checks.append(_latency(comparison, limits.latency_ratio, strict=limits.strict))
    if limits.size_ratio is not None:
        ratio = comparison.size_ratio
        ok = ratio <= limits.size_ratio
        text = texts.size_verdict(comparison, limits.size_ratio, ok=ok)
        status: Status = "passed" if ok else "failed"
        checks.append(Check("size-ratio", limits.size_ratio, ratio, None, status, ok, text))
    if not checks:
        _refuse("gate", comparison.difference_reason)
    return GateResult(comparison, tuple(checks))


def _metric(comparison: Comparison, difference: Difference, limits: GateLimits) -> Check:
    limit, alpha = limits.metric_drop, limits.alpha
    real = difference.drop > 0 and difference.p < alpha
    over = difference.drop > (limit or 0.0)
    status: Status
    if over:
        status = "failed" if real else "undecided"
    elif limit is None:
        status = "passed"
    else:
        status = "passed" if difference.within_p(limit) < alpha else "undecided"
    ok = status == "passed" or (status == "undecided" and not limits.strict)
    share = formats.is_share(comparison.candidate.metric)
    text = texts.metric_verdict(difference, share, limit, alpha, status)
    return Check("metric-drop", limit, difference.drop, difference.ci95, status, ok, text)


def _latency(comparison: Comparison, limit: float, *, strict: bool) -> Check:
    """Judge by the interval: it fails above the limit, holds below, and is undecided across it."""
    latency = comparison.latency
    if latency.value is None or latency.ci95 is None:
        _refuse("--max-latency-ratio", latency.source)
    low, high = latency.ci95
    status: Status = "failed" if low > limit else "passed" if high <= limit else "undecided"
    ok = status == "passed" or (status == "undecided" and not strict)
    text = texts.latency_verdict(latency, limit, status)
    return Check("latency-ratio", limit, latency.value, latency.ci95, status, ok, text)


def _refuse(subject: str, reason: str) -> NoReturn:
    raise DataError(subject, f"has nothing to judge ({reason})", "see the two runs' reports")
