"""The runs that are compared: open them, choose a model in each, and check that they pair."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from compressor.calibration.sources.arrays import NpzSource
from compressor.errors import InputError, SpecError, suggestion
from compressor.files import settle
from compressor.lab.verify.forms import check_report, read_mapping
from compressor.lab.verify.manifests import MANIFEST, REPORT, unchanged_run
from compressor.progress import Progress
from compressor.run.artifacts import FLOAT, SAMPLES
from compressor.types.option_errors import SpecErrors
from compressor.types.tensors import Array

Allowed = Literal["model", "version"]


@dataclass(frozen=True)
class OpenedRun:
    """A run whose report is as the run wrote it.

    Attributes:
        path: as the user named it.
        report: the content of ``report.json``.
        missing: names of files that the run wrote and that are not here.
    """

    path: str
    folder: Path
    report: Mapping[str, Any]
    missing: frozenset[str]

    @cached_property
    def samples(self) -> Mapping[str, Array]:
        """The metric's value for each sample, float64 ``[N]``, by model; empty without a metric.

        Raises:
            InputError: the file is not here.
            DataError: it cannot be read.
        """
        entry = self.report["per_sample"]
        if entry is None:
            return {}
        path = self.folder / str(entry["file"])
        if path.name in self.missing:
            raise InputError(
                f"run {self.path!r}",
                f"has no {path.name}, which holds the results for single samples",
                f"copy it together with {REPORT} and {MANIFEST}, or run the spec again",
            )
        arrays = NpzSource(path=path).feed()
        return {name: array.astype(np.float64) for name, array in arrays.items()}


def open_run(path: Path, progress: Progress) -> OpenedRun:
    """Open a run, and compare its files with its manifest.

    Args:
        path: the output folder, or the ``report.json`` in it.

    Raises:
        SpecError: there is no run.
        InputError: a file was changed since the run, or is of another version.
    """
    subject = f"run {str(path)!r}"
    folder = path if path.is_dir() else path.parent
    if not path.exists() or (path.is_file() and path.name != REPORT):
        raise SpecError(
            subject,
            "is not a report" if path.exists() else "does not exist",
            f"name the output folder of a run, or its {REPORT}",
        )
    settle(folder)
    if not (folder / REPORT).is_file():
        raise SpecError(subject, f"has no {REPORT}", "name the output folder of a run")
    if not (folder / MANIFEST).is_file():
        raise InputError(
            subject,
            f"has no {MANIFEST}, so nothing shows whether {REPORT} is what the run wrote",
            f"copy both, and {SAMPLES}, from the run's output",
        )
    _, files = unchanged_run(folder, subject, progress)
    report = read_mapping(folder / REPORT)
    check_report(report, subject)
    missing = frozenset(file.name for file in files if file.state == "missing")
    return OpenedRun(str(path), folder, report, missing)


_ROLES = ("BASE", "CANDIDATE")


@dataclass(frozen=True)
class Side:
    """One of the two: a run, and the model in it that is compared.

    Attributes:
        name: the artifact's file name, or ``float`` for the float model.
    """

    run: OpenedRun
    name: str
    entry: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Size of all its files; of the float model, what :func:`choose` gave it."""
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

    def as_json(self) -> dict[str, Any]:
        """Return what a comparison says of it."""
        return {
            "run": self.run.path,
            "name": self.run.report["name"],
            "artifact": self.name,
            "sha256": self.entry.get("sha256"),
            "metric": self.metric,
            "bytes": self.bytes,
            "latency_ms": self.entry["latency_ms"],
        }


def choose(
    base: OpenedRun,
    candidate: OpenedRun,
    artifact: str | None = None,
    base_artifact: str | None = None,
) -> tuple[Side, Side]:
    """Choose the models to compare.

    Args:
        artifact: file name or format of the artifact, in both; ``float`` for the float model.
        base_artifact: the same for the base, where it is another one.

    Raises:
        SpecError: there is no such artifact, or more than one that could be meant.
    """
    second = _side(candidate, artifact, "--artifact", _ROLES[1])
    of_base = base_artifact or artifact
    if of_base is None:
        of_base = _counterpart(base, second)
    option = "--artifact" if artifact and not base_artifact else "--base-artifact"
    first = _side(base, of_base, option, _ROLES[0])
    return _as_file(first, second), _as_file(second, first)


def _as_file(side: Side, other: Side) -> Side:
    """Give a float model the size of the file that the other model's was compared with.

    Of two float models, sizes are those of their tensors.
    """
    file_bytes = other.entry.get("float_bytes")
    if side.name != FLOAT or file_bytes is None:
        return side
    return replace(side, entry={**side.entry, "bytes": file_bytes})


def check_comparable(base: Side, candidate: Side, allowed: Collection[Allowed]) -> None:
    """Refuse two models whose results do not pair.

    Raises:
        SpecError: it says everything that differs.
    """
    first, second = base.run.report, candidate.run.report
    pair = f"{base.run.path!r} and {candidate.run.path!r}"
    ours, theirs = (_facts(report) for report in (first, second))
    errors = [
        SpecError(
            pair, f"differ in {title} ({short(ours[what])} against {short(theirs[what])})", remedy
        )
        for what, (title, remedy) in _SHARED.items()
        if ours[what] != theirs[what] and what not in allowed
        # That there is no metric is said once.
        if what != "direction" or None not in (ours[what], theirs[what])
    ]
    if errors:
        raise SpecErrors(errors)


def version_notes(base: Side, candidate: Side) -> list[str]:
    """Return which libraries the two runs had in different versions."""
    ours, theirs = (side.run.report["environment"]["versions"] for side in (base, candidate))
    names = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return [f"{name}: {ours[name]} in the base, {theirs[name]} in the candidate" for name in names]


# Facts that two runs must share, with their titles and remedies.
_SHARED: Mapping[str, tuple[str, str]] = {
    "version": (
        "the version of compressor",
        "run the base's spec again with this version, or --allow version",
    ),
    "model": ("the float model", "compare runs of one model, or --allow model"),
    "data": (
        "the evaluation data",
        "evaluate both on the same data: only then do their samples pair",
    ),
    "metric": ("the metric", "use the same metric in both specs"),
    "direction": (
        "the metric's direction",
        "state higher-is-better alike in both specs, and run the base's again",
    ),
    "metric code": (
        "the metric's code",
        "run the base's spec again with the same code",
    ),
}


def _facts(report: Mapping[str, Any]) -> dict[str, Any]:
    identity, metric = report["identity"], report["baseline"]["metric"]
    return {
        "version": report["environment"]["versions"]["compressor"],
        "model": identity["model"],
        "data": identity["data"],
        "metric": None if metric is None else metric["name"],
        "direction": None if metric is None else direction(metric["higher_is_better"]),
        "metric code": identity["metric_code"],
    }


def direction(higher_is_better: bool) -> str:
    """Return which values of a metric are better."""
    return "higher is better" if higher_is_better else "lower is better"


def short(value: str | None) -> str:
    """Shorten a hash, and name a missing one.

    >>> short("c" * 64), short(None), short("")
    ('cccccccccccc', 'none', 'built in')
    """
    if value is None:
        return "none"
    return value[:12] if len(value) == 64 else value or "built in"


def _side(run: OpenedRun, artifact: str | None, option: str, role: str) -> Side:
    entries: Sequence[Mapping[str, Any]] = run.report["artifacts"]
    if artifact == FLOAT:
        return Side(run, FLOAT, run.report["baseline"])
    if artifact is None:
        matching = [e for e in entries if e["deployed"]] or list(entries)
        problem = f"has {_listed(matching)}"
    else:
        by_name = [e for e in entries if e["path"] == artifact]
        matching = by_name or [e for e in entries if e["format"] == artifact]
        problem = f"has no artifact {artifact!r}, but {_listed(entries)}"
        if len(matching) > 1:
            problem = f"has {_listed(matching)} of the format {artifact!r}"
    if len(matching) == 1:
        return Side(run, str(matching[0]["path"]), matching[0])
    names = [str(e["path"]) for e in entries]
    remedy = (
        suggestion(artifact, names) if artifact and not matching else f"say which with {option}"
    )
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
        p50: medians of base and candidate in milliseconds, where they were measured.
        source: how it was measured, or why it was not.
    """

    value: float | None
    ci95: tuple[float, float] | None
    batch: int | None
    p50: tuple[float | None, float | None]
    source: str


def not_judged(base: Side, candidate: Side) -> str:
    """Return why the two latencies are not compared; empty where they are."""
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
        reason = "the two runs timed no common batch size"
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
    ours, theirs = base.run.report, candidate.run.report
    if ours["identity"]["model"] != theirs["identity"]["model"]:
        return "the two runs have different float models"
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
