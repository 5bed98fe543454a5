"""The page of results takes the tables of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import results

ROW = ["ours", "a|b", "1.0"]


def test_a_table_replaces_those_of_an_earlier_run_and_leaves_the_rest() -> None:
    page = "# Results\n\n<!-- a.py::b -->\nold\n<!-- /a.py::b -->\n\nEnd.\n"
    once = results.with_table(page, "a.py::b", "new", more=False)
    assert once == "# Results\n\n<!-- a.py::b -->\nnew\n<!-- /a.py::b -->\n\nEnd.\n"
    assert results.with_table(once, "a.py::b", "new", more=False) == once
    twice = results.with_table(once, "a.py::b", "second", more=True)
    assert twice == once.replace("new", "new\n\nsecond")


def test_a_table_without_a_section_gets_one_at_the_end() -> None:
    page = results.with_table("# Results\n", "a.py::b", "new", more=False)
    assert page == "# Results\n\n<!-- a.py::b -->\nnew\n<!-- /a.py::b -->\n"


def test_kept_tables_say_when_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Results\n")
    monkeypatch.setenv(results.PAGE, str(page))
    monkeypatch.setattr(results, "_kept", set())
    results.keep("Bytes", ["tool", "file", "share"], [ROW])
    results.keep("Times", ["tool", "file", "share"], [ROW])
    text = page.read_text()
    assert "| ours | a\\|b | 1.0 |" in text
    assert text.index("**Bytes**") < text.index("**Times**")
    assert "test_results_page.py::test_kept_tables_say_when_and_where" in text
    assert text.count("PyTorch 2.") == 2
    assert "VNNI" in text


def test_without_the_variable_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(results.PAGE, raising=False)
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    results.keep("Bytes", ["tool", "file", "share"], [ROW])  # would need the test's name
