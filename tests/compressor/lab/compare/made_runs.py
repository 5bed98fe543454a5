"""Output folders of runs, made by hand: only what a comparison reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compressor import catalog
from compressor.files import file_sha256
from compressor.lab.compare.compare import CompareOptions, Comparison, compare_runs
from compressor.lab.compare.gate import Check, GateLimits, judge
from compressor.run.verdicts.statistics import Scale, paired_difference
from compressor.types.proofs import sealed_text

MODEL, DATA, SPEC = "a" * 64, "b" * 64, "c" * 64
FLOAT_BYTES, BYTES = 4_000_000, 1_000_000


def results(wrong: int, samples: int = 1000, start: int = 0) -> np.ndarray:
    """Return right and wrong answers: ``wrong`` in a row, from ``start`` on, are wrong."""
    values = np.ones(samples)
    values[start : start + wrong] = 0.0
    return values


def made_run(
    folder: Path,
    samples: np.ndarray | None,
    *,
    metric: str = "accuracy",
    artifacts: tuple[str, ...] = ("model.onnx",),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run's report, results of single samples and manifest.

    Args:
        folder: where to.
        samples: the artifacts' results; the float model has every sample right.
        metric: name of a built-in metric.
        artifacts: file names.
        changes: what is set in the report before it is written, by dotted path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = _report(samples, metric, artifacts)
    for path, value in (changes or {}).items():
        *parents, last = [int(p) if p.isdigit() else p for p in path.split("/")]
        entry: Any = report
        for part in parents:
            entry = entry[part]
        entry[last] = value
    files = ["report.json"]
    (folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    if samples is not None:
        packed = samples.astype(bool) if set(np.unique(samples)) <= {0, 1} else samples
        own = np.ones_like(packed)
        np.savez(folder / "samples.npz", float=own, **dict.fromkeys(artifacts, packed))
        files.append("samples.npz")
    for name in artifacts:
        (folder / name).write_bytes(b"no model")
    outputs = [{"name": n, "sha256": file_sha256(folder / n)} for n in (*files, *artifacts)]
    manifest = {
        "name": "made",
        "seed": 0,
        "versions": {"compressor": "0.1.0"},
        "outputs": outputs,
        "spec": {"exports": [{"format": name.partition(".")[2]} for name in artifacts]},
    }
    (folder / "manifest.json").write_text(sealed_text(manifest), encoding="utf-8")
    return folder


def _report(samples: np.ndarray | None, metric: str, artifacts: tuple[str, ...]) -> dict[str, Any]:
    known = catalog.load("metric", metric)
    reason = None if samples is not None else "the spec has no data.evaluation"
    own = None if samples is None else known.summary(samples)
    times = {"batch": 1, "p50": 2.0, "p90": 2.2, "p99": 2.5}
    row = {
        "batch": 1,
        "float": times,
        "artifact": {**times, "p50": 1.0},
        "ratio": {"value": 0.5, "ci95": [0.49, 0.51]},
    }
    return {
        "schema": 1,
        "name": "made",
        "identity": {"model": MODEL, "data": DATA, "metric_code": "", "spec": SPEC},
        "ok": True,
        "verdict": "passed",
        "baseline": {
            "metric": None if samples is None else known.summary(np.ones_like(samples)),
            "metric_reason": reason,
            "bytes": FLOAT_BYTES,
            "parameters": FLOAT_BYTES // 4,
            "macs": None,
            "latency_ms": times,
            "latency": [times],
        },
        "artifacts": [
            {
                "format": name.partition(".")[2],
                "path": name,
                "files": [{"name": name}],
                "bytes": BYTES,
                "sha256": "d" * 64,
                "size_ratio": BYTES / FLOAT_BYTES,
                "runtime": "onnxruntime",
                "deployed": True,
                "checks": [],
                "metric": own,
                "latency_ms": row["artifact"],
                "latency_ratio": 0.5,
                "latency_ratio_reason": None,
                "latency": [row],
            }
            for name in artifacts
        ],
        "passes": [],
        "limits": [],
        "per_sample": None
        if samples is None
        else {
            "file": "samples.npz",
            "factor": 100.0 if known.unit == "%" else 1.0,
            "exponential": known.exponential,
        },
        "environment": {
            "python": "3.12",
            "versions": {"compressor": "0.1.0", "torch": "2.13.0"},
            "processor": "a processor",
            "cores": 2,
            "system": "Linux x86_64",
        },
    }


STORED = CompareOptions(timing=False)


def compared(folder: Path, base: np.ndarray | None, candidate: np.ndarray | None) -> Comparison:
    one, other = made_run(folder / "base", base), made_run(folder / "candidate", candidate)
    return compare_runs(one, other, STORED)


def only(comparison: Comparison, limits: GateLimits) -> Check:
    (check,) = judge(comparison, limits).checks
    return check


def counted(comparison: Comparison, lost: int, won: int, samples: int = 1000) -> Comparison:
    """Return the comparison of models that differ on some of their samples."""
    base, candidate = np.ones(samples), np.ones(samples)
    candidate[:lost], base[lost : lost + won] = 0.0, 0.0
    return replace(comparison, difference=paired_difference(base, candidate, Scale(100.0)))
