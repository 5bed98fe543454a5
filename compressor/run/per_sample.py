"""What a run keeps so that another run can be compared with it: results sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compressor.files import json_sha256, publish, staging
from compressor.run.artifacts import Artifact
from compressor.run.verify import artifact_evaluation
from compressor.run.workspace import Workspace, metric_code
from compressor.types.tensors import Array

SAMPLES = "samples.npz"
"""One array for the float model and one for each artifact: the metric's value for each sample."""

FLOAT = "float"
"""The float model's name in that file."""

_NO_EFFECT = ("output", "limits")


def identity(workspace: Workspace) -> dict[str, Any]:
    """Return what two runs must share for their results to be pairs, as in ``report.json``."""
    plan = workspace.plan
    data, metric = workspace.evaluation, plan.metric
    decides = {k: v for k, v in plan.spec.resolved.items() if k not in _NO_EFFECT}
    return {
        "model": workspace.source_key,
        "data": None if data is None else data.digest,
        "metric_code": None if metric is None else metric_code(metric),
        "spec": json_sha256(decides),
    }


def per_sample_entry(workspace: Workspace) -> dict[str, Any] | None:
    """Say where the results of single samples are, and what makes the metric of them."""
    metric = workspace.plan.metric
    if metric is None or workspace.baseline_evaluation is None:
        return None
    factor = 100.0 if metric.unit == "%" else 1.0
    return {"file": SAMPLES, "factor": factor, "exponential": metric.exponential}


def write_samples(
    workspace: Workspace,
    artifacts: Sequence[Artifact],
    entries: Sequence[Mapping[str, Any]],
    output: Path,
) -> list[Path]:
    """Write the results of the float model and of every artifact that has a metric.

    Args:
        workspace: the run.
        artifacts: what was exported.
        entries: what the report says of them, in the same order.
        output: the folder that the file goes into.

    Returns:
        The file; nothing where no metric was measured.
    """
    baseline = workspace.baseline_evaluation
    if baseline is None:
        return []
    arrays = {FLOAT: _packed(baseline.per_sample)}
    for artifact, entry in zip(artifacts, entries, strict=True):
        evaluation = artifact_evaluation(workspace, artifact) if entry["metric"] else None
        if evaluation is not None:
            arrays[artifact.path.name] = _packed(evaluation.per_sample)
    with staging(output) as folder:
        # An uncompressed archive has no time of day in it, and no version of a compressor.
        np.savez(folder / SAMPLES, **arrays)  # type: ignore[arg-type]  # names are no options
        publish(folder / SAMPLES, output / SAMPLES)
    return [output / SAMPLES]


def _packed(values: Array) -> Array:
    """Store right and wrong in a byte, anything else as it is."""
    return values.astype(np.bool_) if np.isin(values, (0.0, 1.0)).all() else values
