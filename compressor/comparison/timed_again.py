"""Time two runs' artifacts beside each other, which two runs could not."""

from __future__ import annotations

from compressor.bench.finding import find_artifacts
from compressor.bench.inputs import agreed, batch_sizes, declared, fixed_shapes, random_inputs
from compressor.comparison.latency_ratio import LatencyRatio, not_judged, stored_ratio
from compressor.comparison.opened_run import FLOAT
from compressor.comparison.sides import Side
from compressor.errors import SpecError
from compressor.progress import Progress
from compressor.run.artifact_file import Artifact, Machinery
from compressor.run.timing import Latencies, measure

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
