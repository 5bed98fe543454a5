"""What the zoo calls ok, refused and wrong, and the page that is written of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from ruamel.yaml import YAML

from compressor.types.tensors import TensorSpec
from tests.zoo.cases import TABLE, Case, cases
from tests.zoo.judge import judge
from tests.zoo.one import Work
from tests.zoo.page import PAGE, text

FINE = {"code": 0, "message": ""}


@pytest.mark.parametrize(
    ("cell", "outcome", "state", "reason"),
    [
        ("plan", FINE, "ok", ""),
        ("export", {**FINE, "db": 118.0}, "ok", ""),
        ("export", {**FINE, "db": 59.0}, "wrong", "59.0 dB; at least 60 dB is due"),
        ("fuse", {"killed": "time"}, "wrong", "killed: time"),
        ("fuse", {"failed": "AssertionError: 2 outputs for 1"}, "wrong", "AssertionError: 2 ou"),
        ("plan", {"code": 2, "message": "error: x: is odd; no"}, "refused", "x: is odd; no"),
        ("plan", {"code": 3, "message": "internal error: KeyError"}, "wrong", "internal error"),
        ("plan", {"code": 3, "message": "error: x: is odd; report it"}, "wrong", "report it"),
        ("fuse", {"code": 3, "message": "error: x: does not run; check it"}, "wrong", "not run"),
        ("plan", {"code": 3, "message": ""}, "wrong", "exit code 3"),
        ("export", {"code": 4, "message": "the failed checks"}, "wrong", "the failed checks"),
        # 38 dB - 10 log10(10) - 6 dB
        ("static", {**FINE, "db": 22.1, "rounded": 10}, "ok", ""),
        ("static", {**FINE, "db": 21.9, "rounded": 10}, "wrong", "21.9 dB; at least 22 dB is due"),
        ("prune", {**FINE, "reload_db": 120.0}, "ok", ""),
        ("prune", {**FINE, "reload_db": 30.0}, "wrong", "agree to 30.0 dB"),
        ("torch_pruning", {"code": 0, "share": 0.5, "shapes": True}, "ok", ""),
        ("torch_pruning", {"code": 0, "share": 0.9, "shapes": True}, "refused", "90% of the work"),
        ("torch_pruning", {"code": 0, "share": 0.5, "shapes": False}, "wrong", "other shapes"),
        ("reload", {"skipped": "nothing to reload"}, "none", ""),
    ],
)  # fmt: skip
def test_a_cell_is_judged(cell: str, outcome: dict[str, Any], state: str, reason: str) -> None:
    verdict = judge(cell, {cell: outcome})
    assert verdict.state == state
    assert reason in verdict.reason
    assert bool(verdict.reason) == (state in ("refused", "wrong"))


def test_a_network_that_amplifies_errors_is_measured_against_the_peer() -> None:
    cells = {"static": {**FINE, "db": 14.0, "rounded": 10}, "ort_static": {"code": 0, "db": 16.9}}
    assert judge("static", cells).state == "ok"
    cells["ort_static"]["db"] = 17.1
    assert judge("static", cells).state == "wrong"


def test_the_table_has_what_was_promised() -> None:
    table = cases()
    names = [case.name for case in table]
    assert len(set(names)) == len(names)
    counts = Counter(case.kind for case in table if not case.apart)
    assert counts["network"] >= 100
    assert counts["directory"] >= 60
    assert counts["file"] >= 30
    opsets = {int(name.split("-opset")[1]) for name in names if "-opset" in name}
    assert {9, 23} <= opsets
    assert {case.kind for case in table[:6]} == set(counts)


def test_cases_apart_come_last() -> None:
    apart = YAML(typ="safe").load(TABLE)["apart"]
    assert len(set(apart)) == len(apart)
    assert {case.name for case in cases()[-len(apart) :]} == set(apart)
    assert [case.apart for case in cases()] == sorted(case.apart for case in cases())


def test_more_samples_can_be_compared_than_a_file_is_run_on() -> None:
    work = object.__new__(Work)
    work.inputs, work.size, work.like = (TensorSpec("x", (2, 3, 4), "float32"),), 2, ""
    work.case = Case("file", "a", "b")
    assert work.drawn(2, seed=1)["x"].shape == (2, 3, 4)
    assert work.drawn(32, seed=1)["x"].shape == (32, 3, 4)


def line(case: str, kind: str, **cells: Any) -> dict[str, Any]:
    return {"case": case, "kind": kind, "date": "2026-11-22", "cells": {"source": {}, **cells}}


def test_the_page_counts_what_was_run() -> None:
    refused = {"code": 2, "message": "error: target: cannot be reached; set it to 0.7 or more"}
    ratio = {"value": 0.5, "ci95": [0.4, 0.6], "clock": "cpu"}
    page = text(
        [
            line("timm/a", "network", plan=FINE, fuse={**FINE, "db": 30.0}, prune=refused),
            line("timm/b", "network", plan=FINE, fuse={**FINE, "db": 90.0}),
            {
                **line("magika/c", "file", plan=FINE, latency={**FINE, "ratio": ratio}),
                "processor": "EPYC, no VNNI",
            },
        ]
    )
    assert "results of 3 cases: 2 PyTorch networks, 1 ONNX files" in page
    assert "| `fuse` | 1 | 0 | 1 | 60.0 |" in page
    assert "80.0% of the cells" in page
    assert "| timm/a | ok | W 30 | r |" in page
    assert "| magika/c | 0.50 | 0.40 to 0.60 | processor | EPYC, no VNNI |" in page
    assert "Geometric mean: 0.500. Of 1 files, 0 are slower" in page
    assert "`target: cannot be reached; set it to 0.7 or more` — timm/a (prune)" in page


def test_the_page_is_of_cases_that_exist() -> None:
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    shown = {row.split(" | ")[0][2:] for row in rows}
    assert len(shown & {case.name for case in cases()}) >= 10


def test_two_artifacts_of_the_same_codes_agree() -> None:
    """Or else one computes something else, and so may the peer, which has the same kernels."""
    cells = {
        "static": {**FINE, "db": 1.0, "rounded": 50, "reload_db": 0.1},
        "ort_static": {"db": 1.1},
    }
    verdict = judge("static", cells)
    assert verdict.state == "wrong"
    assert verdict.reason == "the two artifacts agree to 0.1 dB; at least 15 dB is due"
    cells["static"]["reload_db"] = 15.1
    assert judge("static", cells).state == "ok"
