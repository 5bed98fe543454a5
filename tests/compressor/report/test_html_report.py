import copy
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from compressor.lab.explain.by_sqnr import FinishedRun, explain_by_sqnr
from compressor.lab.explain.explanation import Explanation
from compressor.report.html import html_report
from compressor.report.layer_drawing import layer_drawing
from compressor.report.past_runs import NONE, Related
from compressor.report.samples import Sample

Report = dict[str, Any]
_VOID = {"meta", "link", "input", "br", "img", "rect", "line", "circle", "path"}
_PICTURE = Markup("data:image/png;base64," + "iVBORw0KGgo=" * 200)  # longer than any name
_SAMPLES = (
    Sample(17, "3", ("3", "5"), _PICTURE, "", True),
    Sample(1204, "“ the”", ("“ the”", "“ <b>”"), Markup(), "once upon <i>a</i> time in", True),
    Sample(3, "0", ("8", "0"), Markup(), "", False),
)
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
    report = request.getfixturevalue(f"{kind}_report")
    whole = html_report(report, explanation=explained(report), samples=_SAMPLES)
    page, text = Page(whole), without_library(whole)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    for tag, attributes in page.tags:
        assert tag not in {"iframe", "object", "embed", "base"}
        assert (tag == "img") == ("src" in attributes)
        assert (attributes.get("src") or "data:").startswith("data:")
        assert attributes.get("href", "data:,") == "data:,"
        assert not any(name.startswith("on") for name in attributes)
    assert len(text) < 100_000
    assert whole == html_report(report, explanation=explained(report), samples=_SAMPLES)


def explained(report: Report) -> Explanation:
    declared = [{"pass": step["pass"]} for step in report["passes"]]
    run = FinishedRun(
        Path("out/x"), report, {"spec": {"passes": declared}, "spec_file": "spec.yaml"}, None
    )
    return explain_by_sqnr(run, 3)


def test_the_first_screen_says_what_to_do_next(failed_report: Report, passed_report: Report):
    text = Page(html_report(failed_report)).text
    said = (
        "Next: other rules for layer3.2.conv2 (skip: true), layer3.2.conv1 (skip: true), "
        "predicted: 124 kB more, accuracy better by 0.20 points."
    )
    diff = "passes: - pass: quantize-static # passes.1 + layers: + - {match: layer3.2.conv2, skip:"
    assert text.index("Failed: 2 of 5") < text.index(said) < text.index(diff)
    assert text.index(diff) < text.index("Before and after")
    reason = passed_report["advice"]["reason"]
    assert f"Next: {reason}." in Page(html_report(passed_report)).text


def test_flipped_samples_have_their_answers(passed_report: Report):
    page = Page(html_report(passed_report, samples=_SAMPLES))
    said = (
        "model.onnx decides otherwise than the float model in 21 of 2,000 samples; 12 of them were"
    )
    assert said in page.text
    assert "sample 17 target 3 float 3 artifact 5" in page.text
    assert "once upon <i>a</i> time in sample 1,204 target “ the” float “ the” artifact “ <b>”" in (
        page.text
    )
    assert [a["src"] for t, a in page.tags if t == "img"] == [_PICTURE]
    wrong = [a for t, a in page.tags if t == "li" and a.get("class") == "card wrong"]
    assert len(wrong) == 2


def test_classes_fold_where_there_are_many(passed_report: Report):
    text = Page(html_report(passed_report)).text
    rows = passed_report["classes"]
    for row in rows:
        change = f"{row['change']:z.2f}".replace("-", "−")
        said = f"{row['class']} 200 92.50 % {row['artifact']:.2f} % {change} points"
        assert said in text
    assert "21 classes, the worst first" not in text
    passed_report["classes"] = [{**rows[0], "class": label} for label in range(21)]
    assert "21 classes, the worst first" in Page(html_report(passed_report)).text


def test_why_is_one_click_away(passed_report: Report):
    page = Page(html_report(passed_report, explanation=explained(passed_report)))
    said = (
        "Of the 312 kB of model.onnx, 275 kB are weights, 7.04 kB scales and zero points, and "
        "30.0 kB the graph: names, shapes and operators. However narrow the weights become, "
        "37.0 kB stay."
    )
    assert said in page.text
    assert "What each layer costs, and what a rule for it would gain" in page.text
    assert sum(tag == "details" for tag, _ in page.tags) == 3
    assert "compress inspect --roofline model.onnx" in page.text
    for artifact in passed_report["artifacts"]:
        artifact["path"] = "model.xml"
    assert "inspect --roofline" not in html_report(passed_report)


def test_the_graph_is_drawn_with_the_numbers_of_the_report(passed_report: Report):
    page = html_report(passed_report)
    shares = passed_report["passes"][1]["attribution"]["layers"]
    for row in shares:
        said = f"{row['name']}: {row['noise_share']:.1f} % of the noise, 5.0 % of the time"
        assert page.count(f"<title>{said}</title>") == 2  # wide and narrow
    layers = passed_report["graph"]["layers"]
    drawing = page[page.index('<svg class="wide"') : page.index('<svg class="narrow"')]
    assert drawing.count('class="link"') == sum(len(layer["reads"]) for layer in layers)
    assert 'style="--noise:0.62;--time:0.62"' in drawing


def test_without_noise_the_graph_shows_time(passed_report: Report):
    passed_report["passes"][1]["attribution"] = None
    text = html_report(passed_report)
    assert '<figure class="card drawing" id="drawing" data-by="time">' in text
    assert 'name="by"' not in text


def test_very_many_layers_are_drawn_as_blocks(passed_report: Report):
    proto = passed_report["graph"]["layers"][0]
    passed_report["graph"]["layers"] = [
        {**proto, "name": f"b{i // 4}.c{i % 4}", "reads": [i - 1] if i else [], "time_share": 0.25}
        for i in range(400)
    ]
    drawing = layer_drawing(passed_report)
    assert drawing is not None
    assert drawing.blocks
    assert len(drawing.boxes) == 100
    assert [(b.name, b.time, b.reads) for b in drawing.boxes[:2]] == [
        ("b0", 1.0, ()),
        ("b1", 1.0, (0,)),
    ]
    del passed_report["graph"]
    assert layer_drawing(passed_report) is None


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
    for key in ("identity", "advice", "flipped", "classes", "graph"):
        del passed_report[key]
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


def test_what_training_moved_is_not_called_lost(passed_report: Report):
    words = "moved by training, not lost"
    page = html_report(passed_report)
    assert words not in page
    assert "it is a distance, not a loss" not in page
    passes = passed_report["passes"]
    passes[0]["training"] = {"steps": 4, "losses": [[1, 0.5], [4, 0.2]]}
    page = html_report(passed_report)
    assert page.count(words) == 1 + sum(entry["sqnr_db"] is not None for entry in passes)
    assert "it is a distance, not a loss" in page


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
