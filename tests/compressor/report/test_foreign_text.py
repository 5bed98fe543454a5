"""Names from files are shown, not obeyed, wherever they go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from compressor.cli.application import application
from compressor.errors import printable
from compressor.files import json_text
from compressor.report.html import html_report
from compressor.report.markdown import markdown_report
from compressor.report.terminal import plain_text, run_page

Report = dict[str, Any]
EVIL = "\x1b]0;title\x07\x9b31m\u202egnp.exe\u2066\x00"
SEEN = r"\x1b]0;title\x07\x9b31m\u202egnp.exe\u2066\x00"


def obeyed(text: str) -> list[str]:
    return sorted({c for c in text if not c.isprintable() and c != "\n"})


def spoiled(report: Report) -> Report:
    """Put the name wherever the report has text from a file."""

    def leaves(value: Any, key: str = "") -> Iterator[tuple[Any, Any]]:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for place, entry in list(items):
            if isinstance(entry, dict | list):
                yield from leaves(entry, str(place))
            elif isinstance(entry, str) and str(place) in NAMES | {0, 1} and key != "units":
                yield value, place

    for holder, place in list(leaves(report)):
        holder[place] = f"{EVIL}{holder[place]}"
    return report


NAMES = {"name", "path", "weakest", "problem", "text", "detail", "reason", "layer"}


@pytest.mark.parametrize(
    "render",
    [
        lambda report: plain_text(run_page(report)),
        markdown_report,
        html_report,
        json_text,
    ],
    ids=["terminal", "Markdown", "HTML", "JSON"],
)
def test_no_renderer_lets_them_through(
    render: Callable[[Report], str], failed_report: Report
) -> None:
    text = render(spoiled(failed_report))
    assert obeyed(text) == []
    assert "gnp.exe" in text


def test_json_means_the_same() -> None:
    value = {EVIL: [EVIL, "plain ü €"]}
    assert json.loads(json_text(value)) == value
    assert "plain ü €" in json_text(value)


def test_a_message_is_one_line_of_printable_text() -> None:
    result = CliRunner().invoke(application, ["inspect", f"{EVIL[:-1]}\nand {'x' * 9000}.onnx"])
    assert result.exit_code == 3
    assert (
        "cannot be used (File name too long); check the path"
        in CliRunner().invoke(application, ["inspect", "x" * 300]).stderr
    )
    assert obeyed(result.stderr) == []
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 2100


@given(st.text())
def test_what_can_be_shown_is_kept(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable() or len(text) > 2000
