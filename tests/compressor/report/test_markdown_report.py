import re
from collections.abc import Callable
from typing import Any

import pytest

from compressor.report.markdown import markdown_report

Report = dict[str, Any]


@pytest.mark.parametrize("kind", ["passed", "failed", "blind"])
def test_markdown_is_as_agreed(
    kind: str, request: pytest.FixtureRequest, golden: Callable[[str, str], None]
):
    golden(f"{kind}.md", markdown_report(request.getfixturevalue(f"{kind}_report")))


def test_the_verdict_comes_first(failed_report: Report):
    lines = markdown_report(failed_report).splitlines()
    assert lines[0] == "# resnet20-edge"
    assert lines[2].startswith("**❌ Failed: 2 of 5 limits")


def test_all_rows_of_a_table_have_as_many_cells(failed_report: Report):
    hostile = "a|b`c\nd"
    failed_report["artifacts"][0]["path"] = hostile
    failed_report["passes"][1]["notes"] = ["x | y <b>z</b>"]
    failed_report["passes"][1]["weakest"]["name"] = hostile
    table: list[int] = []
    for line in [*markdown_report(failed_report).splitlines(), ""]:
        if line.startswith("|"):
            table.append(len(re.findall(r"(?<!\\)\|", line)))
            continue
        assert len(set(table)) <= 1
        table = []


def test_names_cannot_inject_markup(passed_report: Report):
    passed_report["artifacts"][1]["path"] = "<script>alert(1)</script>"
    passed_report["passes"][1]["notes"] = ["<img src=x> [click](there) @everyone"]
    text = markdown_report(passed_report)
    assert "`<script>alert(1)</script>`" in text
    assert re.search(r"(?<!`)<script>", text) is None
    assert r"\<img src=x\> \[click\](there) \@everyone" in text


def test_a_report_without_passes_and_limits_has_no_such_sections(passed_report: Report):
    passed_report.update(passes=[], limits=[])
    text = markdown_report(passed_report)
    assert "## Passes" not in text
    assert "## Limits" not in text
    assert "## Checks" in text


def test_very_many_notes_are_counted_not_shown(passed_report: Report):
    passed_report["passes"][0]["notes"] = [f"note {i}" for i in range(50)]
    text = markdown_report(passed_report)
    assert "note 19" in text
    assert "note 20" not in text
    assert "30 more in report.json" in text
