import copy
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from compressor.report.html import html_report
from compressor.report.past_runs import NONE, Related

Report = dict[str, Any]
_VOID = {"meta", "link", "input", "br", "img", "rect", "line", "circle", "path"}
_LIBRARY = files("compressor.report") / "plot" / "observable-plot.js"


def without_library(text: str) -> str:
    """Cut the charts' library out: it names the addresses of licenses and of XML namespaces."""
    library = _LIBRARY.read_text(encoding="utf-8")
    assert text.count(library) == 1
    return text.replace(library, "")


class Page(HTMLParser):
    """Checks nesting, and keeps the tags, their attributes and the visible text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("kind", ["passed", "failed", "blind"])
def test_every_form_is_well_nested_and_stands_alone(kind: str, request: pytest.FixtureRequest):
    whole = html_report(request.getfixturevalue(f"{kind}_report"))
    page, text = Page(whole), without_library(whole)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    for tag, attributes in page.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    assert len(text) < 100_000
    assert whole == html_report(request.getfixturevalue(f"{kind}_report"))


def test_all_numbers_are_there(passed_report: Report):
    text = Page(html_report(passed_report)).text
    for number in (
        "92.60 %",
        "91.45 to 93.75",
        "92.45 %",
        "91.29 to 93.61",
        "0.15 points",
        "1.09 MB",
        "306 kB",
        "312 kB",
        "0.28 ×",
        "0.29 ×",
        "0.414 ms",
        "0.233 ms",
        "4.27 ms",
        "0.57 ×",
        "0.56 to 0.57",
        "29.3 dB",
        "128.4 dB",
        "98.95 %",
        "0.812",
        "12 s",
        "269,722 parameters",
        "2,000 evaluation samples",
        "40.8 M MACs",
        "0f" * 32,
        "Example CPU at 2.40 GHz, 8 cores",
        "onnxruntime 1.30.0",
    ):
        assert number in text, number
    for layer in passed_report["passes"][1]["layers"]:
        assert layer["name"] in text
        assert f"{layer['sqnr_db']:.1f}" in text


def test_the_verdict_and_what_failed_come_before_the_tables(failed_report: Report):
    text = Page(html_report(failed_report)).text
    first = text.index("Failed: 2 of 5 limits and 1 of 4 checks")
    limit = text.index("accuracy drop 1.20 points (95 % CI 0.95 to 1.50), limit 0.50 points: over")
    assert first < limit < text.index("Before and after")


def test_a_number_that_was_not_measured_says_why(blind_report: Report):
    text = Page(html_report(blind_report)).text
    assert "not measured the spec has no data.evaluation" in text
    assert "not judged a storage format" in text
    assert "None" not in text


def test_hostile_names_stay_text(passed_report: Report):
    hostile = '</script><script>alert("x")</script>'
    passed_report["name"] = hostile
    passed_report["artifacts"][1]["path"] = hostile
    passed_report["artifacts"][1]["checks"][0]["detail"] = hostile
    passed_report["limits"][0]["artifact"] = hostile
    passed_report["passes"][1]["notes"] = [hostile]
    passed_report["passes"][1]["pass"] = hostile
    passed_report["environment"]["processor"] = hostile
    for layer in passed_report["passes"][1]["layers"]:
        layer.update(name=hostile + layer["name"], scheme=hostile, details={hostile: hostile})
    passed_report["passes"][1]["histograms"][0]["name"] = hostile + "linear"
    other = copy.deepcopy(passed_report)
    text = html_report(passed_report, Related({hostile: other}, (hostile,)))
    assert text.count("<script") == text.count("</script>") == 3
    assert 'alert("x")' not in text
    assert hostile in Page(text).text


def test_the_layer_table_can_be_sorted_and_filtered(passed_report: Report):
    page = Page(html_report(passed_report))
    sortable = [a for t, a in page.tags if t == "th" and "aria-sort" in a]
    assert len(sortable) == 9
    assert all(a["aria-sort"] == "none" for a in sortable)
    assert sum(t == "button" for t, _ in page.tags) == 9 + 1  # one saves the table
    assert any(t == "input" and a["type"] == "search" for t, a in page.tags)


def test_shapes_are_shown_where_the_report_has_them(passed_report: Report):
    text = Page(html_report(passed_report)).text
    assert "Shape" in text
    assert "48×48×3×3" in text


def test_reports_of_earlier_versions_are_rendered(passed_report: Report):
    del passed_report["identity"]
    for entry in passed_report["passes"]:
        del entry["histograms"], entry["attribution"]
        for layer in entry["layers"]:
            del layer["kind"], layer["shape"], layer["bytes_before"], layer["bytes"]
    text = Page(html_report(passed_report)).text
    assert "Noise shares are not known" in text
    assert "Weights and inputs" not in text


def test_layers_have_bytes_and_a_share_of_the_noise(passed_report: Report):
    text = html_report(passed_report)
    row = next(line for line in text.splitlines() if "<code>layer3.2.conv2</code>" in line)
    assert re.findall(r'data-v="([\d.]*)"', row)[2:4] == ["82944", "20928"]
    assert "9.0 %" in row
    said = "if this layer alone is compressed, in percent of all that quantize-static adds."
    assert (
        f"{said} 5.0 % lies in values that stay rounded whichever layer is skipped."
        in Page(text).text
    )


def test_what_only_folding_changed_is_not_called_changed(passed_report: Report):
    rows = [line for line in html_report(passed_report).splitlines() if line.startswith("<tr")]
    changed = {re.findall("<code>(.*?)</code>", row)[0] for row in rows if "changed" in row}
    assert len(changed) == 19
    assert "linear" not in changed


def test_ranges_are_told_in_words_too(passed_report: Report):
    first = passed_report["passes"][1]["histograms"][0]
    first["input"].update(range=None, range_reason="it stays float", outside=None)
    text = Page(html_report(passed_report)).text
    assert "values −0.500 to 0.500; together its ranges span −0.495 to 0.500" in text
    assert "values 0 to 8.12; no range: it stays float" in text
    assert "values 0 to 8.12; range 0 to 5.50; 0.043 % cut off" in text


def test_charts_get_the_numbers_of_the_report(passed_report: Report):
    text = html_report(passed_report)
    island = re.findall(r'<script type="application/json" id="chart-data">(.*?)</script>', text)
    data = json.loads(island[0])
    wanted = passed_report["passes"][1]["histograms"]
    assert data["histograms"] == [[item["weight"], item["input"]] for item in wanted]
    assert data["metric"]["float"] == 92.6
    assert data["points"] == []
    both = html_report(passed_report, Related({"other": copy.deepcopy(passed_report)}))
    assert "4 artifacts of 2 runs" in Page(both).text


def test_what_was_left_out_of_the_plot_is_said(passed_report: Report):
    text = Page(html_report(passed_report, Related({}, ("Run 'x' is left out: why.",)))).text
    assert "Run 'x' is left out: why." in text
    assert "Trade-off" not in Page(html_report(passed_report, NONE)).text


def test_a_very_large_model_still_makes_a_small_file(passed_report: Report):
    proto = passed_report["passes"][1]["layers"][0]
    many = [
        {**proto, "name": f"model.{'block.' * 12}{i}.weight", "sqnr_db": 10.0 + i * 0.01}
        for i in range(6000)
    ]
    passed_report["passes"] = [{**passed_report["passes"][1], "layers": many}] * 9
    text = html_report(passed_report)
    assert len(text.encode()) < 1_000_000
    assert ".0.weight</code>" in text
    assert ".5999.weight</code>" not in text
    assert "5,200 more are in report.json" in text


def test_a_report_with_nothing_in_it_renders(passed_report: Report):
    passed_report.update(artifacts=[], passes=[], limits=[])
    page = Page(html_report(passed_report))
    assert "Passed: 0 checks held, no limits are set" in page.text


def test_intervals_lie_inside_their_drawing(failed_report: Report):
    text = html_report(failed_report)
    places = re.findall(r'\b(?:x1|x2|cx|width)="(-?[\d.]+)%"', text)
    assert len(places) > 20
    assert all(0.0 <= float(place) <= 100.0 for place in places)
