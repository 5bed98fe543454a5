"""Compare two runs: their metric sample by sample, their sizes, their latencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.errors import DataError, SpecError
from compressor.lab.bench.bench import in_turn
from compressor.lab.bench.finding import artifacts_of_run
from compressor.lab.bench.inputs import agreed, batch_sizes, declared, fixed_shapes, random_inputs
from compressor.lab.compare.runs import (
    Allowed,
    LatencyRatio,
    Side,
    check_comparable,
    choose,
    not_judged,
    open_run,
    stored_ratio,
    version_notes,
)
from compressor.progress import SILENT, Progress
from compressor.run.artifact_file import ArtifactFile, Machinery
from compressor.run.artifacts import FLOAT
from compressor.run.metrics.metrics import kept_scale
from compressor.run.timing.timing import Latencies
from compressor.run.verdicts.statistics import Difference, paired_difference


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and how.

    Attributes:
        artifact: file name or format of the artifact in both runs; ``float`` for the float model.
        base_artifact: the same for the base, where it is another one.
        allowed: what may differ between the runs.
        timing: run both artifacts in turn to time them; otherwise use what the runs measured.
    """

    artifact: str | None = None
    base_artifact: str | None = None
    allowed: frozenset[Allowed] = frozenset()
    timing: bool = True


@dataclass(frozen=True)
class Comparison:
    """Two models side by side.

    Attributes:
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
    notes: tuple[str, ...] = ()

    @property
    def size_ratio(self) -> float:
        """The candidate's bytes over the base's."""
        return self.candidate.bytes / self.base.bytes

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "schema": 1,
            "base": self.base.as_json(),
            "candidate": self.candidate.as_json(),
            "metric": None if self.difference is None else self.difference.as_json(),
            "metric_reason": self.difference_reason or None,
            "size_ratio": self.size_ratio,
            "latency": {
                "ratio": self.latency.value,
                "ci95": self.latency.ci95,
                "batch": self.latency.batch,
                "p50": self.latency.p50,
                "source": self.latency.source,
            },
            "notes": list(self.notes),
        }


def compare_runs(
    base: Path, candidate: Path, options: CompareOptions, progress: Progress = SILENT
) -> Comparison:
    """Compare the same artifact of two runs, or two artifacts.

    Args:
        base: output folder or report of the run that is compared with.
        candidate: the same of the run that is judged.

    Raises:
        SpecError: there is no such run or artifact, or the two cannot be compared.
        InputError: a file is missing or was changed since its run.
    """
    first, second = choose(
        open_run(base, progress),
        open_run(candidate, progress),
        options.artifact,
        options.base_artifact,
    )
    check_comparable(first, second, options.allowed)
    reason = next((f"{s.name}: {s.metric_reason}" for s in (first, second) if not s.metric), "")
    difference = None
    if not reason:
        with progress.stage("compare samples"):
            difference = _difference(first, second)
    return Comparison(
        base=first,
        candidate=second,
        difference=difference,
        difference_reason=reason,
        latency=timed_ratio(first, second, progress)
        if options.timing
        else stored_ratio(first, second),
        notes=tuple(version_notes(first, second)),
    )


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
                f"has no results for single samples of {side.name!r}",
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
    scale = kept_scale(metric, kept["factor"], exponential=kept["exponential"])
    return paired_difference(ours, theirs, scale)


_BASE, _CANDIDATE = "base", "candidate"


def timed_ratio(base: Side, candidate: Side, progress: Progress) -> LatencyRatio:
    """Run both artifacts in turn on random inputs; if that is impossible, use the stored times.

    Raises:
        CompressorError: an artifact that ran in its own run does not open or run here.
    """
    if not_judged(base, candidate):
        return stored_ratio(base, candidate)
    timed: Latencies | str = _not_here(base) or _not_here(candidate)
    if not timed:
        with progress.stage("time both artifacts"):
            timed = _timed(_artifact(base), _artifact(candidate))
    if isinstance(timed, str):
        stored = stored_ratio(base, candidate)
        return replace(stored, source=f"{stored.source} (not timed beside each other: {timed})")
    ratio = timed.ratio(_CANDIDATE, _BASE)
    low, high = ratio["ci95"]
    ours, theirs = (float(timed.summary(name)["p50"]) for name in (_BASE, _CANDIDATE))
    source = "both run in turn here, on random inputs"
    return LatencyRatio(ratio["value"], (low, high), timed.batch, (ours, theirs), source)


def _not_here(side: Side) -> str:
    if side.name == FLOAT:
        return "the float model is not an artifact of its run"
    entries = [a for a in side.run.report["artifacts"] if a["path"] == side.name]
    missing = [f["name"] for e in entries for f in e["files"] if f["name"] in side.run.missing]
    return f"{side.run.path} has no {missing[0]}" if missing else _artifact(side).cannot_run


def _artifact(side: Side) -> ArtifactFile:
    (artifact,) = artifacts_of_run(side.run.folder, only=side.name)
    return artifact


def _timed(base: ArtifactFile, candidate: ArtifactFile) -> Latencies | str:
    """Time both, or return why random inputs would not do."""
    sides = {_BASE: base, _CANDIDATE: candidate}
    declarations = {name: declared(artifact) for name, artifact in sides.items()}
    if any(entry.branches for entry in declarations.values()):
        return "their times depend on what is in the inputs"
    inputs = {
        name: entry.inputs for name, entry in declarations.items() if entry.inputs is not None
    }
    if not inputs:
        return "neither says what it takes"
    try:
        specs = fixed_shapes(agreed(inputs), {})
        size = batch_sizes(specs, ())[0]
    except SpecError as error:
        return f"{error.subject} {error.problem}"
    return in_turn(sides, Machinery(), random_inputs(specs, size))
