"""``archive``: the smallest LeNet-5 without a significant loss, on digits drawn at 28 x 28.

A table, no assertions: bytes of the float network as safetensors and of the archive, right answers
of both on 10,000 drawn digits, the drop with its interval, and the p-value of the gate's test
(McNemar's, one-sided). Drawings of one digit resemble each other, so that the interval is narrower
than that of as many digits would be. The only number that is set is what may be lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compressor.exporters import ArchiveExporter
from compressor.run.verdicts.statistics import Scale, paired_difference
from compressor.types.tensors import Array
from tests.benchmarks.bench_resnet20 import show
from tests.benchmarks.lenet_digits import LeNet5, trained, write

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(0)]

ROOT = Path(__file__).parents[2]
ALLOWED = 0.1  # points


def spec(folder: Path) -> Path:
    """Write the spec of the search; JSON is YAML."""
    data: dict[str, Any] = {
        name: {"npz": f"{name}.npz", "inputs": {"image": "image"}, "target": "label", "batch": 500}
        for name in ("train", "search", "test")
    }
    data["train"] |= {"transform": "tests.benchmarks.lenet_digits:augment", "batch": 64}
    roles = {"training": "train", "search": "search", "evaluation": "test"}
    document = {
        "version": 1,
        "name": "lenet5",
        "model": {
            "factory": "tests.benchmarks.lenet_digits:LeNet5",
            "checkpoint": "lenet5.pt",
            "inputs": {"image": {"shape": ["batch", 1, 28, 28], "dtype": "float32"}},
        },
        "data": {role: data[name] for role, name in roles.items()},
        "metric": "accuracy",
        "passes": [{"pass": "archive", "max-metric-drop": ALLOWED}],
        "exports": [{"format": "archive", "contexts": True}],
        "output": "out",
    }
    path = folder / "spec.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def right(logits: list[Array], labels: Array) -> Array:
    """Return 1 for each right answer, else 0."""
    return (np.concatenate(logits).argmax(1) == labels).astype(np.float64)


def test_smallest_lenet5(tmp_path: Path) -> None:
    write(tmp_path)
    trained(tmp_path)
    command = [sys.executable, "-m", "compressor", "run", str(spec(tmp_path))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    with np.load(tmp_path / "test.npz") as file:
        images, labels = file["image"], file["label"]
    network = LeNet5().eval()
    network.load_state_dict(torch.load(tmp_path / "lenet5.pt"))
    batches = [images[start : start + 500] for start in range(0, len(labels), 500)]
    with torch.no_grad():
        theirs = right([network(torch.from_numpy(b)).numpy() for b in batches], labels)
    archive = tmp_path / "out" / "model.archive"
    runner = ArchiveExporter().open(archive)
    found = [next(iter(runner.run({"image": batch}).values())) for batch in batches]
    ours = right([np.asarray(logits) for logits in found], labels)
    difference = paired_difference(theirs, ours, Scale(100.0))
    whole = 4 * sum(parameter.numel() for parameter in network.parameters())
    size = archive.stat().st_size
    low, high = difference.ci95
    rows = [
        ["float", f"{whole:,}", "1", f"{100 * theirs.mean():.2f}", "", ""],
        [
            "archive",
            f"{size:,}",
            f"{whole / size:.1f}",
            f"{100 * ours.mean():.2f}",
            f"{difference.drop:.2f} ({low:.2f} to {high:.2f})",
            f"{difference.p:.3f}",
        ],
    ]
    show(
        f"LeNet-5, at most {ALLOWED} points of {len(labels):,} drawn digits",
        ["network", "bytes", "times smaller", "right, %", "drop (95 %)", "p"],
        rows,
    )
    for note in report["passes"][0]["notes"]:
        print(note)
