import io
from collections.abc import Callable
from typing import Any

import pytest

from compressor.report.terminal import plain_text, run_page, show

Report = dict[str, Any]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["passed", "failed", "blind"])
def test_the_table_is_as_agreed(
    kind: str, request: pytest.FixtureRequest, golden: Callable[[str, str], None]
):
    report = request.getfixturevalue(f"{kind}_report")
    golden(f"{kind}.txt", plain_text(run_page(report, "out/resnet20-edge")))


def test_a_pipe_gets_neither_colours_nor_cut_rows(
    failed_report: Report, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    show(run_page(failed_report), stream)
    assert "\x1b" not in stream.getvalue()
    assert "…" not in stream.getvalue()
    assert stream.getvalue() == plain_text(run_page(failed_report))
    assert "Report:" not in stream.getvalue()


def test_a_narrow_terminal_loses_nothing(failed_report: Report, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    show(run_page(failed_report), stream)
    assert "…" not in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_control_characters_and_markup_are_shown_not_obeyed(passed_report: Report):
    passed_report["artifacts"][1]["path"] = "\x1b[2J[red]evil[/red]\n.onnx"
    text = plain_text(run_page(passed_report))
    assert "\x1b" not in text
    assert r"\x1b[2J[red]evil[/red]\n.onnx" in text


def test_the_advice_is_one_line(failed_report: Report):
    for check in failed_report["artifacts"][1]["checks"]:
        check["ok"] = True
    text = plain_text(run_page(failed_report, "out/a"))
    said = [line for line in text.splitlines() if line.startswith("Next: ")]
    assert said == [
        "Next: compress explain out/a --apply (other rules for layer3.2.conv2 (skip: true), "
        "layer3.2.conv1 (skip: true), predicted: 124 kB more, accuracy better by 0.20 points)"
    ]


def test_a_format_that_the_name_does_not_tell_is_named(passed_report: Report):
    passed_report["artifacts"][1].update(path="model.engine", format="tensorrt")
    text = plain_text(run_page(passed_report))
    assert "model.engine tensorrt" in text
    assert "model.safetensors safetensors" not in text


def test_a_recipe_is_to_be_found_where_the_metric_or_the_size_fails(
    failed_report: dict[str, Any], passed_report: dict[str, Any]
):
    line = "Or find a better recipe: compress tune spec.yaml"
    assert line in plain_text(run_page(failed_report, "out/a", "spec.yaml"))
    assert line not in plain_text(run_page(failed_report, "out/a"))  # no file to name
    assert line not in plain_text(run_page(passed_report, "out/a", "spec.yaml"))
    # What is a share of the float model's metric is in no spec.
    limits = [{**entry, "default": True} for entry in failed_report["limits"]]
    unset = {**failed_report, "limits": limits}
    assert f"{line}\n" in plain_text(run_page(unset, "out/a", "spec.yaml"))
    metric = {**failed_report["baseline"]["metric"], "unit": ""}
    unset["baseline"] = {**failed_report["baseline"], "metric": metric}
    assert f"{line} --max-metric-drop 0." in plain_text(run_page(unset, "out/a", "spec.yaml"))
    untunable = [{**entry, "pass": "cast"} for entry in failed_report["passes"]]
    report = {**failed_report, "passes": untunable}
    assert line not in plain_text(run_page(report, "out/a", "spec.yaml"))
