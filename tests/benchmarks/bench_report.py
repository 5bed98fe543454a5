"""Seconds and bytes of ``report.html`` for models of many layers."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from compressor.report.html import html_report
from compressor.report.past_runs import Related
from tests.compressor.report.reports import passed

PASSES = 4
RUNS = 20


def large(layers: int) -> dict[str, Any]:
    """Return a report of four passes over so many layers."""
    report = passed()
    fused, quantized = report["passes"]
    for entry in (fused, quantized):
        rows = entry["layers"]
        entry["layers"] = [
            {**rows[i % len(rows)], "name": f"model.layers.{i // 7}.block.{rows[i % 7]['name']}"}
            for i in range(layers)
        ]
    shares = quantized["attribution"]["layers"]
    quantized["attribution"]["layers"] = [
        {**shares[i % len(shares)], "name": row["name"]}
        for i, row in enumerate(quantized["layers"])
    ]
    worst = quantized["histograms"][0]
    quantized["histograms"] = [
        {**worst, "name": quantized["layers"][i * layers // 8]["name"]} for i in range(8)
    ]
    report["passes"] = [fused] + [quantized] * (PASSES - 1)
    return report


@pytest.mark.benchmark
def test_report(capsys):
    lines = [f"{'layers':>8}{'first s':>10}{'then s':>10}{'kB':>8}"]
    for layers in (20, 100, 400, 800):
        report = large(layers)
        related = Related({f"run-{i}": copy.deepcopy(passed()) for i in range(RUNS)})
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            text = html_report(report, related)
            seconds.append(time.perf_counter() - start)
        size = len(text.encode()) / 1000
        lines.append(f"{layers:8}{seconds[0]:10.3f}{min(seconds):10.3f}{size:8.0f}")
    with capsys.disabled():
        print("", *lines, sep="\n")
