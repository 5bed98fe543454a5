import re
from html.parser import HTMLParser
from typing import Any

import pytest

from compressor.report.html import html_report

Report = dict[str, Any]
_VOID = {"meta", "link", "input", "br", "img", "rect", "line", "circle", "path"}


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
    text = html_report(request.getfixturevalue(f"{kind}_report"))
    page = Page(text)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    for tag, attributes in page.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    assert len(text) < 60_000
    assert text == html_report(request.getfixturevalue(f"{kind}_report"))


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
    limit = text.index("accuracy drop 1.20 points, limit 0.50 points: over by 0.70 points")
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
    text = html_report(passed_report)
    assert text.count("<script>") == 1
    assert text.count("</script>") == 1
    assert 'alert("x")' not in text
    assert hostile in Page(text).text


def test_the_layer_table_can_be_sorted_and_filtered(passed_report: Report):
    page = Page(html_report(passed_report))
    sortable = [a for t, a in page.tags if t == "th" and "aria-sort" in a]
    assert len(sortable) == 6
    assert all(a["aria-sort"] == "none" for a in sortable)
    assert sum(t == "button" for t, _ in page.tags) == 6
    assert any(t == "input" and a["type"] == "search" for t, a in page.tags)


def test_shapes_are_shown_where_the_report_has_them(passed_report: Report):
    for layer in passed_report["passes"][1]["layers"]:
        layer["shape"] = [64, 3, 3, 3]
    text = Page(html_report(passed_report)).text
    assert "Shape" in text
    assert "64×3×3×3" in text


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
    assert "4,500 more are in report.json" in text


def test_a_report_with_nothing_in_it_renders(passed_report: Report):
    passed_report.update(artifacts=[], passes=[], limits=[])
    page = Page(html_report(passed_report))
    assert "Passed: 0 checks held, no limits are set" in page.text


def test_intervals_lie_inside_their_drawing(failed_report: Report):
    text = html_report(failed_report)
    places = re.findall(r'\b(?:x1|x2|cx|width)="(-?[\d.]+)%"', text)
    assert len(places) > 20
    assert all(0.0 <= float(place) <= 100.0 for place in places)
