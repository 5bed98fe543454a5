"""The page of ``compress tune``, word for word."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor.lab.tune.answer import Answer, Goal, Point, with_beaten
from compressor.lab.tune.options import choice_words
from compressor.report.markdown import markdown_page
from compressor.report.pages.tune import tune_page
from compressor.report.terminal import plain_text
from compressor.report.tune_front import tune_html

GOLDEN = Path(__file__).parent / "golden"

POINTS = with_beaten(
    [
        Point("8 bits", 302_100, 0.274, 0.45, 32.1, 0.1, (-0.28, 0.5), "passed"),
        Point("4 bits", 166_900, 0.152, 1.2, 18.7),
        Point("4 bits, equalize", 167_000, 0.152, 1.21, 18.6),
        Point(
            "round 1: 13 of 20 layers 8 bits, 7 4 bits",
            *(199_800, 0.182, 0.62, 24.3, 0.2, (-0.4, 0.8), "passed"),
        ),
    ]
)
PATH = (
    "8 bits: 302 kB (0.27 ×), 32.1 dB, may lose 0.45 points",
    "equalize: -0.1 dB for nothing; left out",
)


def answer(chosen: str | None, reason: str = "") -> Answer:
    return Answer(
        name="resnet20",
        goal=Goal(metric_drop=1.0),
        metric="accuracy",
        share=True,
        points=tuple(POINTS),
        chosen=chosen,
        reason=reason,
        path=PATH,
        not_tried=("3 bits: the onnx file is not smaller than with 4 bits (167 kB)",),
        search="data.search",
        evaluations=2,
    )


FOUND = answer("round 1: 13 of 20 layers 8 bits, 7 4 bits")
OPEN = replace(
    FOUND, points=tuple(replace(p, verdict=p.verdict and "unknown") for p in FOUND.points)
)
MISSED = answer(None, "no artifact was found that loses at most 0.10 points; the nearest: 8 bits")


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("tune.txt", tune_page(FOUND, Path("tuned.yaml"))),
        ("tune_open.txt", tune_page(OPEN, Path("tuned.yaml"))),
        ("tune_missed.txt", tune_page(MISSED)),
    ],
)
def test_the_page_is_the_golden_one(name: str, page: object):
    assert plain_text(page) == (GOLDEN / name).read_text(encoding="utf-8")  # type: ignore[arg-type]


def test_a_search_whose_time_was_up_says_so_at_the_end():
    words = "The time was up: the same command goes on from here."
    assert words not in plain_text(tune_page(FOUND))
    late = replace(FOUND, not_tried=("round 1: the time was up (--budget)",))
    assert plain_text(tune_page(late)).rstrip().endswith(words)


def test_markdown_says_the_same():
    text = markdown_page(tune_page(FOUND, "tuned.yaml"))
    assert text == (GOLDEN / "tune.md").read_text(encoding="utf-8")


def test_a_point_is_beaten_by_one_that_is_smaller_and_quieter():
    assert [p.name for p in POINTS if p.beaten] == ["4 bits, equalize"]


def test_widths_of_layers_in_words():
    assert choice_words({"a": "8"}) == "all layers 8 bits"
    assert choice_words({"a": "8", "b": "float", "c": "8"}) == "2 of 3 layers 8 bits, 1 float"


def charted(answer: Answer) -> Any:
    page = tune_html(answer, "tuned.json", "tuned.yaml")
    (data,) = re.findall(r'id="chart-data">(.*?)</script>', page)
    return json.loads(data)


def test_the_front_has_every_point_and_fades_what_is_beaten():
    data = charted(FOUND)
    assert data["metric"]["title"] == "Output SQNR (dB)"
    assert [(p["run"], p["metric"], p["size_ratio"]) for p in data["points"]] == [
        (p.name, p.sqnr_db, p.size_ratio) for p in POINTS
    ]
    assert [p["run"] for p in data["points"] if p["beaten_in_size"]] == ["4 bits, equalize"]
    assert [p["run"] for p in data["points"] if p["own"]] == [FOUND.chosen]


def test_the_front_shows_losses_where_the_search_data_have_labels():
    losses = (0.1, 0.4, 0.3, 0.2)
    points = [replace(p, search_drop=n) for p, n in zip(POINTS, losses, strict=True)]
    data = charted(replace(FOUND, points=tuple(points)))
    assert (data["metric"]["title"], data["metric"]["higher"]) == ("Loss (points)", False)
    assert [p["metric"] for p in data["points"]] == list(losses)
    # By ratio both of 4 bits are as small, and the second loses less.
    assert [p["run"] for p in data["points"] if p["beaten_in_size"]] == ["4 bits"]


def test_the_front_obeys_no_name_of_a_layer():
    points = [replace(POINTS[0], name="<script>alert(1)</script>")]
    page = tune_html(replace(FOUND, points=tuple(points)), "tuned.json", None)
    assert "<script>alert" not in page
    assert "Next:" not in page
