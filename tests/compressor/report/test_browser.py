"""The page in a real Chromium: it opens, sorts, filters, draws, prints, and shows the report."""

from __future__ import annotations

import copy
import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from markupsafe import Markup

from compressor.lab.compare.trend import LevelChange, Point, Trend
from compressor.report.html import html_report
from compressor.report.past_runs import Related
from compressor.report.samples import Sample, shown_samples
from tests.chromium import chromium
from tests.compressor.report.reports import advice, passed
from tests.compressor.report.test_samples import Stream, data

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

A4_WIDTH = 703  # pixels between margins of 12 mm
KEYS = ("layer", "shape", "scheme", "zeros", "before", "after", "weight", "sqnr", "share")

SIDE = 64  # of a picture that takes more characters than any name may have


def samples() -> list[Sample]:
    """Two pictures of noise as a run shows them, and a text between them."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
    entries = [
        {"index": 0, "place": None, "target": 3, "float": 3, "artifact": 5},
        {"index": 1, "place": None, "target": 0, "float": 8, "artifact": 0},
    ]
    first, last = shown_samples({"flipped": {"worst": entries}}, data(Stream(image=pixels)))
    text = "once upon a time in " * 8
    return [
        replace(first, index=17),
        Sample(1204, "“ the”", ("“ the”", "“ a”"), Markup(), text, True),
        replace(last, index=3),
    ]


Report = dict[str, Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def report() -> Report:
    made = passed()
    losses = [[step, 2.0 / step] for step in range(1, 41)]
    made["advice"] = advice()
    made["passes"][1]["training"] = {"steps": 40, "losses": losses}
    return made


@pytest.fixture(scope="module")
def address(report: Report, tmp_path_factory: pytest.TempPathFactory) -> str:
    other = copy.deepcopy(report)
    other["artifacts"][1]["metric"]["value"] = 91.0
    path = tmp_path_factory.mktemp("page") / "report.html"
    runs = tuple(
        Point(f"commit-{n}", value, (value - 1, value + 1), 1000, None)
        for n, value in enumerate((91.0, 91.5, 91.2, 89.0))
    )
    step = LevelChange(3, "commit-3", 2.2, (1.5, 2.9), 0.001)
    history = Trend("accuracy", "%", True, runs, (step,))
    page = html_report(report, Related({"earlier": other}), history, samples=samples())
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """Open the page; a message on the console or a request for anything else fails the test."""
    contexts, problems = [], []

    def open_page(width: int = 1280, scheme: str = "light", scripts: bool = True) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            java_script_enabled=scripts,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url))
        page.goto(address)
        assert problems.pop(0) == address
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [problem for problem in problems if not problem.startswith(("blob:", "data:"))]


def column(page: Page, key: str) -> list[str]:
    """Return what the shown rows hold, in their order: raw values, or text where there are none."""
    return page.evaluate(
        """(index) => [...document.querySelectorAll("#layer-table tbody tr:not([hidden])")].map(
             (row) => row.cells[index].dataset.v
               ?? (row.cells[index].querySelector("code") ?? row.cells[index]).textContent)""",
        KEYS.index(key),
    )


def numbers(texts: list[str]) -> list[float]:
    return [float(text) for text in texts if text]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "light"),
        (1280, "dark"),
        pytest.param(390, "dark", marks=pytest.mark.slow),
        pytest.param(1280, "light", marks=pytest.mark.slow),
    ],
)
def test_it_opens_without_a_word_and_without_the_network(
    opened: Callable[..., Page], width: int, scheme: str
):
    page = opened(width, scheme)
    assert page.title() == "resnet20-edge: passed"
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width, "the page itself scrolls sideways"
    assert page.locator(".plot svg").count() == 3 + 2 + 4 + 1 + 1
    for color, least in (("--ink", 7.0), ("--quiet", 4.5), ("--good", 4.5), ("--bad", 4.5)):
        assert contrast(page, color, "--card") >= least, color
    for color in ("--ours", "--base", "--cut"):
        assert contrast(page, color, "--card") >= 3.0, color


def contrast(page: Page, ink: str, paper: str) -> float:
    """Return the contrast of two colours as WCAG 2.2 defines it."""
    lights = [luminance(page, name) for name in (ink, paper)]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def luminance(page: Page, name: str) -> float:
    text = page.evaluate(
        "(name) => getComputedStyle(document.documentElement).getPropertyValue(name)", name
    )
    parts = [int(text.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_it_shows_the_numbers_of_the_report(opened: Callable[..., Page], report: Report):
    page = opened()
    layers = report["passes"][1]["layers"]
    shares = [row["noise_share"] for row in report["passes"][1]["attribution"]["layers"]]
    assert column(page, "layer") == [row["name"] for row in layers]
    assert numbers(column(page, "before")) == [row["bytes_before"] for row in layers]
    assert numbers(column(page, "after")) == [row["bytes"] for row in layers]
    assert numbers(column(page, "sqnr")) == pytest.approx([r["sqnr_db"] for r in layers], abs=1e-4)
    assert numbers(column(page, "share")) == pytest.approx(shares, abs=1e-4)
    tiles = page.locator(".tile .value").all_inner_texts()
    assert tiles == ["92.45 %", "312 kB", "0.233 ms"]
    assert "0.57 × (0.56 to 0.57)" in page.locator(".tile").nth(2).inner_text()
    assert page.locator(".verdict strong").inner_text() == "Passed: 5 limits and 4 checks held"


def test_every_column_sorts_both_ways(opened: Callable[..., Page]):
    page = opened()
    names = sorted(column(page, "layer"))
    for key in KEYS:
        head = page.locator(f'#layer-table th[data-key="{key}"]')
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        up = column(page, key)
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        down = column(page, key)
        assert page.locator('th[aria-sort]:not([aria-sort="none"])').count() == 1
        if key in ("layer", "scheme"):
            assert [natural(text) for text in up] == sorted(natural(text) for text in up)
            assert [natural(text) for text in down] == sorted(map(natural, down), reverse=True)
        else:
            known = len(numbers(up))
            assert numbers(up) == sorted(numbers(up)), key
            assert numbers(down) == sorted(numbers(down), reverse=True), key
            assert "" not in up[:known] + down[:known], "what is not known comes last"
        assert sorted(column(page, "layer")) == names


def natural(text: str) -> list[int | str]:
    """Split so that numbers compare as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def test_rows_are_filtered_by_name_scheme_and_change(opened: Callable[..., Page]):
    page = opened()
    count = page.locator("#layer-filter output")
    assert count.inner_text() == "20 of 20 layers"
    page.get_by_label("Name").fill("LAYER2.1")
    assert column(page, "layer") == ["layer2.1.conv1", "layer2.1.conv2"]
    assert count.inner_text() == "2 of 20 layers"
    page.get_by_label("Name").fill("no such layer")
    assert column(page, "layer") == []
    page.get_by_label("Name").fill("")
    page.get_by_label("Scheme").select_option("float32")
    assert column(page, "layer") == ["linear"]
    page.get_by_label("changed only").check()
    assert column(page, "layer") == []
    page.get_by_label("Scheme").select_option("")
    assert len(column(page, "layer")) == 19


def test_the_chart_shows_the_rows_of_the_table(opened: Callable[..., Page]):
    page = opened()
    bars = page.locator('[data-panel="share"] svg g[aria-label="rect"] rect')
    assert bars.count() == 20
    page.locator('#layer-table th[data-key="share"] button').click()
    heights = [float(bar.get_attribute("height") or "") for bar in bars.all()]
    assert heights == sorted(heights)
    page.get_by_label("Name").fill("layer3")
    assert bars.count() == 6


def test_the_chart_and_the_table_point_at_each_other(opened: Callable[..., Page]):
    page = opened()
    slider = page.get_by_role("slider")
    page.locator("#layer-table tbody tr").nth(4).hover()
    assert slider.get_attribute("aria-valuenow") == "5"
    slider.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    said = "layer1.0.conv1, int8/channel, 9.22 kB → 2.37 kB, 39.9 dB, 0.5 % of the noise"
    assert slider.get_attribute("aria-valuetext") == said
    assert page.locator("figcaption", has_text=said).count() == 1
    assert page.locator("tr.marked code").all_inner_texts() == ["layer1.0.conv1"]
    page.keyboard.press("End")
    assert page.locator("tr.marked code").all_inner_texts() == ["linear"]


def test_the_shown_rows_are_saved(opened: Callable[..., Page], tmp_path: Path, report: Report):
    page = opened()
    page.get_by_label("Name").fill("linear")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    download.value.save_as(tmp_path / "layers.csv")
    with (tmp_path / "layers.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["linear"]
    assert int(rows[0]["after"]) == report["passes"][1]["layers"][-1]["bytes"]


def test_everything_can_be_read_without_scripts(opened: Callable[..., Page]):
    page = opened(scripts=False)
    for words in ("layer3.2.conv2", "fused batch-norm", "0.043 % cut off", "2 runs", "40 steps"):
        assert page.get_by_text(words).first.is_visible(), words
    for hidden in ("#layer-filter", "#layer-chart", "#trade-off-charts"):
        assert not page.locator(hidden).is_visible()


def test_nothing_is_cut_off_on_paper(opened: Callable[..., Page]):
    page = opened(A4_WIDTH)
    page.emulate_media(media="print")
    cut = page.evaluate(
        """(width) => [...document.querySelectorAll("table, svg, .card, .tile")]
             .filter((item) => item.checkVisibility())
             .filter((item) => item.getBoundingClientRect().right > width + 1
               || item.scrollWidth > item.clientWidth + 1 && item.matches(".card"))
             .map((item) => item.outerHTML.slice(0, 80))""",
        A4_WIDTH,
    )
    assert cut == []
    assert not page.locator("#layer-filter").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    box = page.locator(".card.long").bounding_box()
    table = page.locator("#layer-table").bounding_box()
    assert box is not None
    assert table is not None
    assert table["height"] <= box["height"] + 1


def test_headings_and_names_for_screen_readers(opened: Callable[..., Page]):
    page = opened()
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    unnamed = page.evaluate(
        """[...document.querySelectorAll("svg[role=img], input, select, [role=region]")]
             .filter((item) => !item.getAttribute("aria-label") && !item.labels?.length
               && !item.getAttribute("aria-labelledby")).length"""
    )
    assert unnamed == 0
    scopes = page.evaluate('[...document.querySelectorAll("th")].filter((h) => !h.scope).length')
    assert scopes == 0


def test_the_history_is_drawn(opened: Callable[..., Page]) -> None:
    page = opened()
    figure = page.locator("#history-chart")
    assert figure.is_visible()
    assert figure.locator("circle").count() == 4
    assert "commit-3" in figure.locator("circle title").last.text_content()
    assert "accuracy stepped down at run 4" in page.locator("#history + .card").inner_text()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_screen_says_what_to_do_next(
    opened: Callable[..., Page], width: int, report: Report
) -> None:
    page = opened(width)
    box = page.locator("pre.diff").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 900
    assert box["x"] + box["width"] <= width
    shown = page.locator("pre.diff").inner_text().splitlines()
    assert [line.rstrip() for line in shown if line.strip()] == report["advice"]["diff"]


def test_flipped_samples_are_pictures_or_text(opened: Callable[..., Page]) -> None:
    page = opened()
    assert page.locator(".samples li").count() == 3
    pictures = page.locator(".samples img")
    assert pictures.count() == 2
    assert pictures.first.evaluate("(image) => image.complete && image.naturalWidth") == SIDE
    assert page.locator(".samples blockquote").inner_text().startswith("once upon")
    words = page.locator(".samples li").first.inner_text().split()
    assert words == ["sample", "17", "target", "3", "float", "3", "artifact", "5"]


def test_classes_are_those_of_the_report(opened: Callable[..., Page], report: Report) -> None:
    page = opened()
    rows = page.locator("#classes + .card tbody tr")
    assert rows.count() == len(report["classes"])
    assert rows.first.inner_text().split()[:2] == ["0", "200"]


@pytest.mark.parametrize(("width", "kind"), [(390, "narrow"), (1280, "wide")])
def test_the_graph_is_drawn_by_noise_or_time(
    opened: Callable[..., Page], width: int, kind: str, report: Report
) -> None:
    page = opened(width)
    drawing = page.locator("#drawing")
    assert drawing.locator("svg:visible").count() == 1
    boxes = drawing.locator(f"svg.{kind} .box")
    assert boxes.count() == len(report["graph"]["layers"])
    size = drawing.locator(f"svg.{kind} text").first.evaluate(
        "(text) => text.getBoundingClientRect().height"
    )
    assert size >= 8, "names are legible"
    first = boxes.last.evaluate("(box) => getComputedStyle(box).fillOpacity")
    assert drawing.locator(f"svg.{kind} .share:visible").first.inner_html() == "0.0 %"
    drawing.get_by_label("time share").check()
    assert drawing.locator(f"svg.{kind} .share:visible").first.inner_html() == "5.0 %"
    assert float(first) == float(boxes.last.evaluate("(b) => getComputedStyle(b).fillOpacity"))


def test_without_scripts_the_graph_shows_noise_alone(opened: Callable[..., Page]) -> None:
    page = opened(scripts=False)
    assert not page.locator("#drawing form").is_visible()
    assert page.locator("#drawing .share.noise:visible").count() > 0
    assert page.locator("#drawing .share.time:visible").count() == 0


def test_reasons_are_one_click_away(opened: Callable[..., Page]) -> None:
    page = opened()
    words = page.get_by_text("275 kB are weights")
    assert not words.is_visible()
    page.get_by_text("Why the file is not smaller").click()
    assert words.is_visible()
