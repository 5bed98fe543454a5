"""The page of ``compress tune``: the answer, the path to it, and every measured artifact."""

from __future__ import annotations

from pathlib import Path

from compressor.errors import argument
from compressor.lab.tune.answer import Answer, Point
from compressor.lab.tune.watch import BUDGET
from compressor.report import formats
from compressor.report.page import GAP, Block, Cell, Page, Style, Table, bullets, left, line, right
from compressor.report.terminal import VERDICT_STYLES


def tune_page(answer: Answer, written: Path | str | None = None) -> Page:
    """Return the answer, the table of points and the path.

    Args:
        written: the file of the tuned spec.
    """
    page: list[Block] = [line(headline(answer), VERDICT_STYLES[answer.verdict]), GAP]
    page += [points_table(answer), GAP, line("The path to it:", "strong")]
    page += bullets(answer.path, "")
    if answer.not_tried:
        page += [GAP, line("Not tried:", "strong"), *bullets(answer.not_tried)]
    evaluations = formats.plural(answer.evaluations, "evaluation")
    metric = answer.metric
    if metric == "agreement":  # chosen by the form of the outputs, where no spec says otherwise
        metric += " (the share of samples whose largest score is the float model's)"
    page += [GAP, line(f"Searched on {answer.search}; judged by {metric} with {evaluations}.")]
    if any(why.endswith(BUDGET) for why in answer.not_tried):
        page.append(line("The time was up: the same command goes on from here."))
    if written is not None:
        page.append(line(f"Written: {written}. Next: compress run {argument(written)}", "good"))
    return page


def points_table(answer: Answer) -> Table:
    """Return every measured artifact; those that another one beats are faint."""
    columns = [
        *left("recipe"),
        *right("size", "ratio", "output SQNR", "may lose", "drop", "95 %"),
        *left("limit"),
    ]
    timed = any(point.latency_ratio is not None for point in answer.points)
    columns.insert(3, right("latency ratio")[0])
    rows = [_cells(answer, point) for point in answer.points]
    return Table(columns, rows).picked([*[True] * 3, timed, *[True] * 5])


def _cells(answer: Answer, point: Point) -> list[Cell]:
    style: Style = "strong" if point.name == answer.chosen else "faint" if point.beaten else ""
    proved = {"passed": "proved", "unknown": "not proved", "failed": "broken", None: ""}
    texts = [
        point.name,
        formats.size(point.bytes),
        formats.ratio(point.size_ratio),
        formats.NOTHING if point.latency_ratio is None else formats.ratio(point.latency_ratio),
        "equal" if point.sqnr_db is None else formats.decibel(point.sqnr_db),
        _amount(answer, point.bound),
        _amount(answer, point.drop),
        _interval(answer, point),
        proved[point.verdict],
    ]
    return [Cell(text, style=style) for text in texts]


def headline(answer: Answer) -> str:
    """Return the answer in one line."""
    point = answer.point
    if point is None:
        return f"{answer.name}: {answer.reason}"
    parts = [f"{answer.name}: {point.name}", formats.size(point.bytes)]
    parts.append(f"{formats.ratio(point.size_ratio)} the float model's size")
    if point.latency_ratio is not None:
        parts.append(f"{formats.ratio(point.latency_ratio)} its latency")
    if point.drop is not None:
        limit, lost = (_amount(answer, x) for x in (answer.goal.metric_drop, point.drop))
        measured, interval = f"{lost} of {answer.metric}", f"95 % CI {_interval(answer, point)}"
        if answer.goal.metric_drop is None:
            parts.append(f"loses {measured} ({interval})")
        elif answer.verdict == "passed":
            parts.append(f"proved to lose at most {limit} of {answer.metric}")
            parts[-1] += f" (measured {lost}, {interval})"
        else:
            parts.append(f"loses {measured} as measured, but is not proved to lose at most {limit}")
            parts[-1] += f" ({interval})"
    return ", ".join(parts)


def _amount(answer: Answer, value: float | None) -> str:
    if value is None:
        return formats.NOTHING
    return formats.metric_change(value, share=answer.share)


def _interval(answer: Answer, point: Point) -> str:
    if point.ci95 is None:
        return formats.NOTHING
    return formats.metric_change_interval(point.ci95, share=answer.share)
