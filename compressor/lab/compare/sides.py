"""The two models that are compared, and whether they may be."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compressor.errors import SpecError, suggestion
from compressor.lab.compare.opened_run import OpenedRun
from compressor.run.artifacts import FLOAT
from compressor.spec.validate import SpecErrors
from compressor.types.tensors import Array

Allowed = Literal["model", "version"]
_ROLES = ("BASE", "CANDIDATE")


@dataclass(frozen=True)
class Side:
    """One of the two: a run, and the model in it that is compared.

    Attributes:
        run: where it is from.
        name: the artifact's file name, or ``float`` for the float model.
        entry: what the report says of it.
    """

    run: OpenedRun
    name: str
    entry: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Size of all its files; of the float model, of its tensors."""
        return int(self.entry["bytes"])

    @property
    def metric(self) -> Mapping[str, Any] | None:
        """The metric as in the report, where it was measured."""
        entry: Mapping[str, Any] | None = self.entry["metric"]
        return entry

    @property
    def metric_reason(self) -> str:
        """Why there is no metric, where there is none."""
        baseline = self.run.report["baseline"]
        reason = self.entry.get("metric_reason") or baseline.get("metric_reason")
        return str(reason or "the report gives no reason")

    @property
    def samples(self) -> Array | None:
        """The metric's value for each sample, ``[N]``; ``None`` where none was measured."""
        return self.run.samples.get(self.name)


def choose(
    base: OpenedRun,
    candidate: OpenedRun,
    artifact: str | None = None,
    base_artifact: str | None = None,
) -> tuple[Side, Side]:
    """Choose the models to compare.

    Args:
        base: the run that is compared with.
        candidate: the run that is judged.
        artifact: file name or format of the artifact, in both; ``float`` for the float model.
        base_artifact: the same for the base, where it is another one.

    Raises:
        SpecError: there is no such artifact, or more than one that could be meant.
    """
    second = _side(candidate, artifact, "--artifact", _ROLES[1])
    wanted = base_artifact or artifact
    if wanted is None:
        wanted = _counterpart(base, second)
    first = _side(base, wanted, "--base-artifact" if base_artifact else "--artifact", _ROLES[0])
    return first, second


def check_comparable(base: Side, candidate: Side, allowed: Collection[Allowed]) -> None:
    """Refuse two models whose results are no pairs.

    Args:
        base: one model.
        candidate: the other.
        allowed: what may differ.

    Raises:
        SpecError: it says everything that differs.
    """
    first, second = base.run.report, candidate.run.report
    pair = f"{base.run.path!r} and {candidate.run.path!r}"
    ours, theirs = (_facts(report) for report in (first, second))
    differing = [
        (what, f"{_short(ours[what])} against {_short(theirs[what])}", remedy)
        for what, remedy in _REMEDIES.items()
        if ours[what] != theirs[what] and what not in allowed
    ]
    if differing:
        raise SpecErrors(
            [SpecError(pair, f"differ in {_TITLES[w]} ({d})", r) for w, d, r in differing]
        )


def version_notes(base: Side, candidate: Side) -> list[str]:
    """Say which libraries the two runs had in other versions."""
    ours, theirs = (side.run.report["environment"]["versions"] for side in (base, candidate))
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return [f"{name}: {ours[name]} in the base, {theirs[name]} in the candidate" for name in names]


_TITLES: Mapping[str, str] = {
    "version": "the version of compressor",
    "model": "the float model",
    "data": "the evaluation data",
    "metric": "the metric",
    "metric code": "the metric's code",
}
_REMEDIES: Mapping[str, str] = {
    "version": "run the base's spec again with this version, or --allow version",
    "model": "compare runs of one model, or --allow model",
    "data": "evaluate both on the same data: only then do their samples pair",
    "metric": "use the same metric in both specs",
    "metric code": "run the base's spec again with the same code",
}


def _facts(report: Mapping[str, Any]) -> dict[str, Any]:
    identity, metric = report["identity"], report["baseline"]["metric"]
    return {
        "version": report["environment"]["versions"]["compressor"],
        "model": identity["model"],
        "data": identity["data"],
        "metric": None if metric is None else metric["name"],
        "metric code": identity["metric_code"],
    }


def _short(value: str | None) -> str:
    """Shorten a hash, and name what is not there."""
    if value is None:
        return "none"
    return value[:12] if len(value) == 64 else value or "built in"


def _side(run: OpenedRun, wanted: str | None, option: str, role: str) -> Side:
    entries: Sequence[Mapping[str, Any]] = run.report["artifacts"]
    if wanted == FLOAT:
        return Side(run, FLOAT, run.report["baseline"])
    if wanted is None:
        found = [e for e in entries if e["deployed"]] or list(entries)
        problem = f"has {_listed(found)}"
    else:
        by_name = [e for e in entries if e["path"] == wanted]
        found = by_name or [e for e in entries if e["format"] == wanted]
        problem = f"has no artifact {wanted!r}, but {_listed(entries)}"
        if len(found) > 1:
            problem = f"has {_listed(found)} of the format {wanted!r}"
    if len(found) == 1:
        return Side(run, str(found[0]["path"]), found[0])
    names = [str(e["path"]) for e in entries]
    remedy = suggestion(wanted, names) if wanted and not found else f"say which with {option}"
    raise SpecError(f"{role} {run.path!r}", problem, remedy)


def _counterpart(base: OpenedRun, candidate: Side) -> str | None:
    """Name the artifact of the base that belongs to the candidate's, if one obviously does."""
    entries = base.report["artifacts"]
    if any(e["path"] == candidate.name for e in entries):
        return candidate.name
    same = [e for e in entries if e["format"] == candidate.entry.get("format")]
    return str(same[0]["path"]) if len(same) == 1 else None


def _listed(entries: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(e["path"]) for e in entries) or "no artifact"


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
