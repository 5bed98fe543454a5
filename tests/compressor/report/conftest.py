"""The reports that several tests render, and the texts that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.compressor.report.reports import (
    NO_DATA,
    NOTHING,
    advice,
    latency,
    limits,
    metric,
    passed,
)


@pytest.fixture
def passed_report() -> dict[str, Any]:
    """Two artifacts, all limits and checks hold."""
    return passed()


@pytest.fixture
def failed_report() -> dict[str, Any]:
    """The ONNX file is less accurate and slower than the limits allow, and a check failed."""
    report = copy.deepcopy(passed())
    artifact = report["artifacts"][1]
    artifact.update(metric=metric(91.4), metric_drop=1.2)
    artifact["latency"][0] = latency(1, 0.412, 0.52)
    artifact["latency_ms"] = artifact["latency"][0]["artifact"]
    artifact["latency_ratio"] = artifact["latency"][0]["ratio"]["value"]
    artifact["checks"][1].update(ok=False, detail="12.1 dB; at least 35.3 dB")
    report.update(ok=False, verdict="failed", limits=limits(report["artifacts"]))
    report["advice"] = advice()
    return report


@pytest.fixture
def blind_report() -> dict[str, Any]:
    """No evaluation data: no metric anywhere, and the reason for it."""
    report = copy.deepcopy(passed())
    report["baseline"].update(metric=None, metric_reason=NO_DATA)
    for artifact in report["artifacts"]:
        artifact.update(
            metric=None, metric_reason=NO_DATA, metric_drop=None, sqnr_db=None, agreement=None
        )
    for step in report["passes"]:
        step.update(metric=None, metric_drop=None, sqnr_db=None)
    report.update(verdict="unknown", limits=limits(report["artifacts"]), flipped=None, classes=None)
    reason = "nothing is worth trying before quality is measured"
    report["advice"] = {**NOTHING, "reason": reason}
    return report


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file in ``golden/``; what differs is written to ``NAME.new`` there."""
    folder = request.path.parent / "golden"

    def compare(name: str, text: str) -> None:
        path, fresh = folder / name, folder / f"{name}.new"
        want = path.read_text(encoding="utf-8") if path.is_file() else None
        if text != want:
            fresh.write_text(text, encoding="utf-8")
        assert text == want, f"if the change is meant, rename golden/{fresh.name} to {name}"
        fresh.unlink(missing_ok=True)

    return compare
