"""Verdicts: what a measurement says about a limit, and what all limits say about a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from compressor.errors import DataError, SpecError
from compressor.run.metrics.metrics import Metric
from compressor.run.verdicts.statistics import exact_p
from compressor.spec.keys import LimitKeys
from compressor.types.tensors import Array

Verdict = Literal["passed", "failed", "unknown"]

WIDEST_RATIO = 1.5
"""The factor between the bounds of a ratio's interval from which on it has to clear the limit.

Bounds that far apart are 22 % to either side, so that they cannot tell a model from one that takes
a fifth longer; and whatever disturbed the measurement that much may have disturbed it more.
"""


def verdict_of(
    interval: tuple[float, float] | None, limit: float, widest: float | None = None
) -> Verdict:
    """Return whether a measurement keeps within a limit.

    Args:
        interval: the bounds of what was measured, twice the same if it is exact; ``None`` if it
            was not measured.
        limit: the largest value that is allowed.
        widest: for ratios, the factor between the bounds beyond which an interval has to lie half
            its own width away from the limit, in logarithms; ``None`` for differences.

    Returns:
        ``passed`` if the interval lies inside, ``failed`` if it lies outside; ``unknown`` if it
        straddles the limit, is too wide so near to it, or there is none.
    """
    low, high = interval or (math.nan, math.nan)
    if widest is not None and high > widest * low:
        half = (high / low) ** 0.5 if low > 0 else math.inf
        low, high = low / half, high * half
    if low <= high <= limit:
        return "passed"
    return "failed" if limit < low <= high else "unknown"


_FLOAT_DB = 100.0  # noise of float32, by whichever order it adds, is below


def same_function(sqnr_db: float | None) -> bool:
    """Return whether a model computes on the evaluation data what the float model computes.

    Its outputs then differ by no more than float32 rounds, so that no sample decided otherwise for
    want of numbers: an interval, which holds for what only these samples show, has no part in it.

    Args:
        sqnr_db: of its outputs to the float model's; ``None`` if they are equal.
    """
    return sqnr_db is None or sqnr_db >= _FLOAT_DB


DEFAULT_SHARE = 0.01  # of the metric's value, for metrics that have no points
_STRADDLES = "the 95 % interval contains the limit"
_TOO_WIDE = "the 95 % interval is too wide so near to the limit"
NO_SHARE = "a share of the float model's value, which is 0, is no limit"
BLIND = "one answer for all samples would also be within the limit"
TRAINED_ON = "a pass trains on the samples that judge"
COPIES = "of the samples are copies of others"
_LIMITS = ("metric_drop", "size_ratio", "latency_ratio")


def judge(
    limits: LimitKeys,
    artifacts: Sequence[Mapping[str, Any]],
    float_metric: Mapping[str, Any] | None,
    *,
    shrinks: bool,
    constant: float | None = None,
    zeros: float | None = None,
    no_evidence: str = "",
) -> list[dict[str, Any]]:
    """Return the entries of ``report.json`` on limits: one for each limit and artifact.

    Storage formats have no latency to judge, unless that is asked for and there is nothing else. A
    default says nothing about the size either if the plan does not make the model smaller.

    Args:
        artifacts: their entries in the report.
        float_metric: the float model's; ``None`` if none was measured.
        shrinks: whether the passes make the model smaller.
        constant: how much worse the float model's metric is if it gives all samples one answer;
            ``None`` if that is not known. A limit that allows as much shows nothing.
        zeros: the float model's error if all its outputs were zero, of which a default limit is a
            share where the float model itself has none; ``None`` for other metrics.
        no_evidence: why the samples cannot show that a limit of the metric holds.
    """
    entries: list[dict[str, Any]] = []
    any_served = any(_is_served(artifact) for artifact in artifacts)
    for artifact in artifacts:
        has_latency = _is_served(artifact)
        for name in _LIMITS:
            limit, default = getattr(limits, name), limits.is_default(name)
            if limit is None or (name == "size_ratio" and default and not shrinks):
                continue
            if name == "latency_ratio" and not has_latency and (default or any_served):
                continue
            stated = True
            if name == "metric_drop" and default:
                own = _default_drop(limit, float_metric, zeros)
                limit, stated = own or 0.0, own is not None
            value, interval, reason = _measurement(name, artifact)
            if name == "metric_drop" and value is not None:
                verdict, blind = drop_verdict(
                    value, interval, limit, artifact["sqnr_db"], constant, no_evidence
                )
            else:
                verdict, blind = verdict_of(interval, limit, WIDEST_RATIO), ""
            if verdict != "passed" and not stated:
                verdict, reason = "unknown", NO_SHARE
            elif blind:
                reason = blind
            elif verdict == "unknown" and interval is not None:
                reason = _STRADDLES if interval[0] <= limit <= interval[1] else _TOO_WIDE
            entries.append(
                {
                    "name": name.replace("_", "-"),
                    "artifact": artifact["path"],
                    "limit": limit,
                    "measured": value,
                    "ci95": None if interval is None or name == "size_ratio" else list(interval),
                    "default": default,
                    "verdict": verdict,
                    "reason": reason or None,
                    "ok": verdict != "failed",
                }
            )
    return entries


def drop_verdict(
    drop: float,
    interval: tuple[float, float] | None,
    limit: float,
    sqnr_db: float | None,
    constant: float | None,
    no_evidence: str = "",
) -> tuple[Verdict, str]:
    """Return the verdict on a drop of the metric, and why a limit that holds shows nothing.

    Args:
        interval: of the drop; ``None`` where it has none.
        sqnr_db: of the artifact's outputs. What computes the same needs no samples to show it.
        constant: by how much one answer for all samples is worse than the float model's; ``None``
            if that is not known. A limit that allows as much tells nothing from nothing, but for
            outputs that are the same: these may have wrong labels alone.
        no_evidence: as in :func:`judge`.
    """
    same = same_function(sqnr_db)
    verdict = "passed" if same and drop <= limit else verdict_of(interval, limit)
    if verdict == "passed" and constant is not None and constant <= (0.0 if same else limit):
        change = "gains" if constant < 0 else "loses at most"
        return "unknown", f"{BLIND}: it {change} {abs(constant):.3g}"
    if verdict == "passed" and no_evidence and not same:
        return "unknown", no_evidence
    return verdict, ""


def _is_served(artifact: Mapping[str, Any]) -> bool:
    """Return whether an artifact's latency is judged, here or where it can be run."""
    # What cannot be run here has one reason for both; a storage format has a reason of its own.
    unrun = not artifact["latency"]
    reason = artifact["latency_ratio_reason"]
    return bool(artifact["deployed"] or (unrun and reason == artifact["latency_ms_reason"]))


def _default_drop(
    points: float, float_metric: Mapping[str, Any] | None, zeros: float | None
) -> float | None:
    """Return the default limit of a metric's drop in its unit; ``None`` if nothing tells it.

    It depends on the float model and the data alone, so that artifacts are judged alike.
    """
    if float_metric is None or float_metric["unit"] == "%":
        return points
    whole = abs(float(float_metric["value"])) or zeros
    return None if whole is None else DEFAULT_SHARE * whole


def _measurement(
    name: str, artifact: Mapping[str, Any]
) -> tuple[float | None, tuple[float, float] | None, str]:
    """Return what was measured, its interval, and why it was not."""
    if name == "size_ratio":
        ratio = artifact["size_ratio"]
        return ratio, (ratio, ratio), ""
    if name == "metric_drop":
        drop, bounds, metric = (artifact[f"metric{n}"] for n in ("_drop", "_drop_ci95", ""))
        if drop is None:
            return None, None, artifact["metric_reason"]
        # Shares have an interval; of a mean's spread, one sample says nothing.
        alone = metric["samples"] == 1 and metric["unit"] != "%"
        if alone and artifact["max_abs_diff"] != 0.0:
            return drop, None, "one sample has no interval"
        return drop, (bounds[0], bounds[1]), ""
    if not artifact["deployed"]:
        return None, None, artifact["latency_ratio_reason"]
    ratio = artifact["latency"][0]["ratio"]
    return ratio["value"], (ratio["ci95"][0], ratio["ci95"][1]), ""


def overall(limits: Sequence[Mapping[str, Any]], artifacts: Sequence[Mapping[str, Any]]) -> Verdict:
    """Return the verdict on a run.

    Args:
        limits: the entries that :func:`judge` returns.
        artifacts: the entries of the report, with their checks.
    """
    checks = [check for artifact in artifacts for check in artifact["checks"]]
    verdicts = [entry["verdict"] for entry in limits]
    verdicts += [check.get("verdict") for check in checks]
    if "failed" in verdicts or not all(check["ok"] for check in checks):
        return "failed"
    return "unknown" if "unknown" in verdicts else "passed"


AGREES = "agrees with the model it was exported from"
CHECK_SAMPLES = 64
"""How many samples an artifact is compared on with its source, at most."""

_FAITHFUL_DB = 40.0
_MARGIN_DB = 6.0
_ROUNDING_DB = 0.5  # by which one way of rounding may be further from the float model
_BROKEN_DB = 10.0  # no way of rounding has ten times the error of another
_CERTAIN = 0.001  # the chance at which samples that got worse are no longer taken for chance


def agreement(written: float | None, compressed: float | None, errors: Array) -> dict[str, Any]:
    """Return the entry of ``report.json`` on whether an artifact agrees with its source.

    It does if it is much nearer to its source than that is to the float model. Runtimes round ties
    differently, though, and over many layers that becomes noise as strong as that of quantization:
    then what counts is the distance from the float model, to which an error adds and another way
    of rounding does not. Whether that has grown is a sign test over the samples (Conover, Practical
    Nonparametric Statistics, section 3.4).

    Args:
        written: signal over the artifact's difference from its source, in dB; ``None`` if equal.
        compressed: signal over the source's difference from the float model, in dB; ``None`` if
            equal.
        errors: ``[N, 2]``, for each sample the sum of squared differences from the float model of
            the artifact and of its source.
    """
    needed = _FAITHFUL_DB if compressed is None else min(_FAITHFUL_DB, compressed + _MARGIN_DB)
    detail = f"{'equal' if written is None else f'{written:.1f} dB'}; at least {needed:.1f} dB"
    entry: dict[str, Any] = {"name": AGREES, "ok": True, "detail": detail}
    if written is None or written >= needed:
        return entry
    errors = np.unique(errors, axis=0)  # a fixed batch is filled with samples that it has already
    theirs, ours = errors.sum(axis=0)
    if compressed is None:
        return {**entry, "ok": False}
    farther = 10.0 * math.log10(theirs / ours) if theirs else -math.inf
    least, beside = compressed - _ROUNDING_DB, compressed - farther
    detail += f", or {beside:.1f} dB beside the float model; at least {least:.1f} dB"
    entry["detail"] = detail
    if beside >= least:
        return entry
    worse = int((errors[:, 0] > errors[:, 1] * 10.0 ** (_ROUNDING_DB / 10.0)).sum())
    chance = exact_p(worse, len(errors) - worse)
    if farther > _BROKEN_DB or chance < _CERTAIN:
        return {**entry, "ok": False}
    samples = f"{len(errors)} sample{'s' if len(errors) > 1 else ''}"
    detail += f"; {samples} cannot tell an error from another way of rounding"
    detail += "" if len(errors) >= CHECK_SAMPLES else ": evaluate more"
    return {**entry, "detail": detail, "verdict": "unknown"}


def check_reachable(metric: Metric, expected: float, where: str) -> None:
    """Raise ``SpecError`` for a figure of the owner's that no model can have."""
    low, high = (bound * metric.scale.factor for bound in metric.bounds)
    if metric.exponential or low <= expected <= high:
        return
    unit = f" {metric.unit}" if metric.unit else ""
    raise SpecError(
        "metric.expect",
        f"is {expected:g}, and {metric.name} lies between {low:g} and {high:g}{unit}",
        "give the figure in the metric's unit, or remove it",
        where=where,
    )


def check_expected(float_metric: Mapping[str, Any], expected: float, where: str) -> None:
    """Check that the float model gives the figure that its owner states for it.

    A wrong normalization, shifted labels or constant channels show here, before a compressed model
    is judged by them.

    Raises:
        DataError: the interval of what was measured does not contain it.
    """
    low, high = float_metric["ci95"]
    rounding = 1e-9 * max(abs(low), abs(high))  # an interval may end at 100 %, as computed
    if low - rounding <= expected <= high + rounding:
        return
    unit = " %" if float_metric["unit"] == "%" else ""
    value, samples = f"{float_metric['value']:.4g}{unit}", float_metric["samples"]
    raise DataError(
        f"metric {float_metric['name']!r}",
        f"is {value} for the float model (95 % interval {low:.4g} to {high:.4g}, {samples:,} "
        f"samples), and the spec expects {expected:g}{unit}",
        "check the normalization, the order of channels and labels, and the data",
        where=where,
    )
