"""``qat`` in whole runs: what training won back is in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compressor.report.tables import pass_notes
from tests.compressor.tiny_project import Project, torch_project


def project(folder: Path, **options: Any) -> Project:
    found = torch_project(folder)
    found.spec["data"]["training"] = {
        "npz": "test.npz",
        "inputs": {"image": "image"},
        "target": "label",
        "batch": 16,
    }
    found.spec["metric"] = "perplexity"
    found.spec["passes"] = [  # what has learned nothing has nothing to lose
        {"pass": "finetune", "epochs": 10, "learning-rate": 0.01},
        {"pass": "qat", "optimizer": "sgd", "activations": {"bits": 4}, **options},
    ]
    found.spec["exports"] = [{"format": "onnx"}]
    return found


def test_the_report_measures_the_network_before_it_is_trained(tmp_path: Path) -> None:
    """A training that changes nothing shows what calibrated ranges alone give."""
    options: dict[str, Any] = {"weights": {"bits": 2}}
    idle = project(tmp_path / "idle", **options, steps=1, **{"learning-rate": 1e-12})
    trained = project(tmp_path / "trained", **options, epochs=20, **{"learning-rate": 0.03})
    (_, still), (tuned, moved) = (p.run().report["passes"] for p in (idle, trained))
    assert tuned["sqnr_db"] is not None
    assert tuned["weakest"] is moved["weakest"] is None  # moved by training, not lost
    assert still["untrained"]["metric"] == moved["untrained"]["metric"]
    # What follows the pass is the artifact's, the same but for the rounding of float32.
    after = still["metric"]["value"]
    assert after == pytest.approx(still["untrained"]["metric"]["value"], rel=1e-6)
    assert still["untrained"]["won_back"] == pytest.approx(0, abs=1e-3)
    lost = moved["untrained"]["metric_drop"]
    left = moved["metric"]["value"] - tuned["metric"]["value"]
    assert lost == pytest.approx(after - tuned["metric"]["value"], rel=1e-4)
    assert lost > left
    assert moved["untrained"]["won_back"] == pytest.approx(100 * (lost - left) / lost, rel=1e-4)
    notes = pass_notes(trained.report()["passes"][1])
    assert notes[0].startswith("without training ")
    assert notes[0].endswith(f"training won {100 * (lost - left) / lost:.0f} % of that back")
    again = trained.run()
    assert again.cached
    assert again.report["passes"][1]["untrained"] == moved["untrained"]


def test_nothing_lost_is_nothing_to_win_back(tmp_path: Path) -> None:
    found = project(tmp_path, steps=2, activations={"bits": 8}, **{"learning-rate": 1e-6})
    _, entry = found.run().report["passes"]
    untrained = entry["untrained"]
    assert (untrained["won_back"] is None) == (untrained["metric_drop"] <= 0)
    assert (untrained["won_back_reason"] is None) == (untrained["metric_drop"] > 0)
