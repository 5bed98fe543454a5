"""Compare two runs: their metric sample by sample, their sizes, their latencies."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressor.errors import DataError, SpecError
from compressor.lab.bench.finding import find_artifacts
from compressor.lab.bench.inputs import agreed, batch_sizes, declared, fixed_shapes, random_inputs
from compressor.lab.compare.difference import Difference, Scale, paired_difference
from compressor.lab.compare.opened_run import open_run
from compressor.lab.compare.sides import (
    Allowed,
    LatencyRatio,
    Side,
    check_comparable,
    choose,
    not_judged,
    stored_ratio,
    version_notes,
)
from compressor.progress import Progress, Silent
from compressor.run.artifact_file import Artifact, Machinery
from compressor.run.artifacts import FLOAT
from compressor.run.timing import Latencies, measure


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and how.

    Attributes:
        artifact: file name or format of the artifact in both runs; ``float`` for the float model.
        base_artifact: the same for the base, where it is another one.
        allowed: what may differ between the runs.
        timing: run both artifacts in turn to time them; otherwise take what the runs measured.
    """

    artifact: str | None = None
    base_artifact: str | None = None
    allowed: frozenset[Allowed] = frozenset()
    timing: bool = True


@dataclass(frozen=True)
class Comparison:
    """Two models side by side.

    Attributes:
        base: what is compared with.
        candidate: what is judged.
        difference: how much worse the candidate's metric is; ``None`` where none was measured.
        difference_reason: why there is none.
        latency: the candidate's latency over the base's.
        notes: what a reader should know of the two runs.
    """

    base: Side
    candidate: Side
    difference: Difference | None
    difference_reason: str
    latency: LatencyRatio
    notes: tuple[str, ...] = field(default=())

    @property
    def size_ratio(self) -> float:
        """The candidate's bytes over the base's."""
        return self.candidate.bytes / self.base.bytes

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "schema": 1,
            "base": _side_json(self.base),
            "candidate": _side_json(self.candidate),
            "metric": None if self.difference is None else _difference_json(self.difference),
            "metric_reason": self.difference_reason or None,
            "size_ratio": self.size_ratio,
            "latency": {
                "ratio": self.latency.value,
                "ci95": None if self.latency.ci95 is None else list(self.latency.ci95),
                "batch": self.latency.batch,
                "p50": list(self.latency.p50),
                "source": self.latency.source,
            },
            "notes": list(self.notes),
        }


def compare_runs(
    base: Path, candidate: Path, options: CompareOptions, progress: Progress | None = None
) -> Comparison:
    """Compare the same artifact of two runs, or two artifacts.

    Args:
        base: output folder or report of the run that is compared with.
        candidate: the same of the run that is judged.
        options: which artifacts, and how.
        progress: shows how far it is.

    Raises:
        SpecError: there is no such run or artifact, or the two cannot be compared.
        InputError: a file is missing or was changed since its run.
    """
    progress = progress or Silent()
    first, second = choose(
        open_run(base, progress),
        open_run(candidate, progress),
        options.artifact,
        options.base_artifact,
    )
    check_comparable(first, second, options.allowed)
    reason = _no_metric(first, second)
    difference = None
    if not reason:
        with progress.stage("compare samples"):
            difference = _difference(first, second)
    return Comparison(
        base=first,
        candidate=second,
        difference=difference,
        difference_reason=reason,
        latency=_latency(first, second, options.timing, progress),
        notes=tuple(version_notes(first, second)),
    )


def _latency(base: Side, candidate: Side, timing: bool, progress: Progress) -> LatencyRatio:
    if not timing:
        return stored_ratio(base, candidate)

    return timed_ratio(base, candidate, progress)


def _no_metric(base: Side, candidate: Side) -> str:
    return next((f"{s.name}: {s.metric_reason}" for s in (base, candidate) if not s.metric), "")


def _difference(base: Side, candidate: Side) -> Difference:
    """Compare the metric sample by sample.

    Raises:
        DataError: a run has no results of single samples, or of another number of them.
    """
    ours, theirs = base.samples, candidate.samples
    for side, samples in ((base, ours), (candidate, theirs)):
        if samples is None:
            raise DataError(
                f"run {side.run.path!r}",
                f"has no results of single samples for {side.name!r}",
                "run the spec again",
            )
    assert ours is not None
    assert theirs is not None
    if ours.shape != theirs.shape or ours.ndim != 1 or not ours.size:
        raise DataError(
            f"runs {base.run.path!r} and {candidate.run.path!r}",
            f"have results of shapes {list(ours.shape)} and {list(theirs.shape)}",
            "run both specs again on the same evaluation data",
        )
    kept, metric = candidate.run.report["per_sample"], candidate.metric
    assert metric is not None
    scale = Scale(kept["factor"], kept["exponential"], metric["higher_is_better"])
    return paired_difference(ours, theirs, scale)


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "run": side.run.path,
        "name": side.run.report["name"],
        "artifact": side.name,
        "sha256": side.entry.get("sha256"),
        "metric": side.metric,
        "bytes": side.bytes,
        "latency_ms": side.entry["latency_ms"],
    }


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "drop": difference.drop,
        "ci95": list(difference.ci95),
        "p": difference.p,
        "p_exact": difference.p_exact,
        "method": difference.method,
        "samples": difference.samples,
        "lost": difference.lost,
        "won": difference.won,
    }


_BASE, _CANDIDATE = "base", "candidate"


def timed_ratio(base: Side, candidate: Side, progress: Progress) -> LatencyRatio:
    """Run both artifacts in turn on random inputs; where that cannot be, take what is stored.

    Args:
        base: what is compared with.
        candidate: what is judged.
        progress: shows that it takes its time.

    Raises:
        CompressorError: an artifact that ran in its own run does not open or run here.
    """
    if not_judged(base, candidate):
        return stored_ratio(base, candidate)
    reason = _not_here(base) or _not_here(candidate)
    found: Latencies | str = reason
    if not reason:
        with progress.stage("time both artifacts"):
            found = _timed(_artifact(base), _artifact(candidate))
    if isinstance(found, str):
        stored = stored_ratio(base, candidate)
        source = f"{stored.source} (not timed beside each other: {found})"
        return LatencyRatio(stored.value, stored.ci95, stored.batch, stored.p50, source)
    ratio = found.ratio(_CANDIDATE, _BASE)
    low, high = ratio["ci95"]
    ours, theirs = (float(found.summary(name)["p50"]) for name in (_BASE, _CANDIDATE))
    source = "both run in turn here, on random inputs"
    return LatencyRatio(ratio["value"], (low, high), found.batch, (ours, theirs), source)


def _not_here(side: Side) -> str:
    """Say why an artifact cannot be run here; empty where it can."""
    if side.name == FLOAT:
        return "the float model is no artifact of its run"
    entries = side.run.report["artifacts"]
    missing = [f["name"] for e in entries for f in e["files"] if f["name"] in side.run.missing]
    return f"{side.run.path} has no {missing[0]}" if missing else _artifact(side).cannot_run


def _artifact(side: Side) -> Artifact:
    path = side.run.folder / side.name
    return next(a for a in find_artifacts([side.run.folder]) if a.path == path)


def _timed(base: Artifact, candidate: Artifact) -> Latencies | str:
    """Time both; or say why random inputs would not do."""
    sides = {_BASE: base, _CANDIDATE: candidate}
    known = {name: declared(artifact) for name, artifact in sides.items()}
    if any(entry.branches for entry in known.values()):
        return "their times depend on what is in the inputs"
    inputs = {name: entry.inputs for name, entry in known.items() if entry.inputs is not None}
    if not inputs:
        return "neither says what it takes"
    try:
        specs = fixed_shapes(agreed(inputs), {})
        size = batch_sizes(specs, ())[0]
    except SpecError as error:
        return f"{error.subject} {error.problem}"
    openers = {name: artifact.opener(Machinery()) for name, artifact in sides.items()}
    return measure(openers, random_inputs(specs, size))
