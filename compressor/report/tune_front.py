"""The front that ``compress tune`` found, as one HTML file in the style of a run's report."""

from __future__ import annotations

from dataclasses import asdict

from compressor.lab.tune.answer import Answer
from compressor.lab.tune.answer import Point as Measured
from compressor.report import formats
from compressor.report.html import chart_library, template
from compressor.report.pages.tune import headline, points_table
from compressor.report.past_runs import Point, with_beaten


def tune_html(answer: Answer, name: str, written: str | None) -> str:
    """Render every measured artifact, those faded that another one beats.

    The charts have one kind of quality for all points, since only some were judged on the
    evaluation data: what the metric loses on the search data, or else the ratio of signal to noise
    of the outputs.

    Args:
        name: the file that has all numbers.
        written: the tuned spec, if there is one.
    """
    loss = all(point.search_drop is not None for point in answer.points)
    points = _points(answer, loss=loss)
    unit = "points" if answer.share else answer.metric
    quality = f"Loss ({unit})" if loss else "Output SQNR (dB)"
    return template("tune.html").render(
        answer=answer,
        headline=headline(answer),
        written=written,
        quality=quality,
        loss=loss,
        timed=any(point.latency_ratio is not None for point in points),
        measured=points_table(answer),
        evaluations=formats.plural(answer.evaluations, "evaluation"),
        numbers=name,
        chart_data={
            "metric": {
                "title": quality,
                "unit": "",
                "float": 0.0 if loss else None,
                "higher": not loss,
            },
            "points": [asdict(point) for point in points],
        },
        library=chart_library(),
    )


def _points(answer: Answer, *, loss: bool) -> list[Point]:
    """Return the artifacts as points; equal outputs have no ratio of signal to noise."""
    made = [_point(answer, m, m.search_drop if loss else m.sqnr_db) for m in answer.points]
    return with_beaten([point for point in made if point is not None], higher_is_better=not loss)


def _point(answer: Answer, measured: Measured, quality: float | None) -> Point | None:
    if quality is None:
        return None
    return Point(
        run=measured.name,
        artifact=formats.size(measured.bytes),
        metric=quality,
        metric_ci95=(quality, quality),
        size_ratio=measured.size_ratio,
        latency_ratio=measured.latency_ratio,
        latency_ci95=measured.latency_ci95,
        verdict=measured.verdict or "unknown",
        own=measured.name == answer.chosen,
    )
