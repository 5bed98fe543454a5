"""What a gate leaves for a CI system: JUnit XML, Markdown, and a job's summary."""

import xml.etree.ElementTree as Tree
from pathlib import Path

import pytest

from compressor.errors import SpecError
from compressor.lab.compare.compare import CompareOptions
from compressor.lab.compare.gate import GateLimits
from compressor.progress import Silent
from compressor.report.gate_files import SUMMARY, GateFiles, run_gate
from tests.compressor.lab.compare.made_runs import made_run, results

STORED = CompareOptions(timing=False)
LIMITS = GateLimits(metric_drop=0.3, latency_ratio=1.2, size_ratio=0.5)

GOLDEN = Path(__file__).with_name("golden") / "gate.md"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs, in which the test stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SUMMARY, raising=False)
    made_run(tmp_path / "base", results(5))
    made_run(tmp_path / "candidate", results(13))
    return tmp_path


def gate(files: GateFiles, limits: GateLimits = LIMITS) -> bool:
    result, _ = run_gate(Path("base"), Path("candidate"), STORED, limits, files, Silent())
    return result.ok


def test_junit_has_a_case_for_each_check(here: Path) -> None:
    assert not gate(GateFiles(junit=Path("ci/junit.xml")))
    root = Tree.parse(here / "ci" / "junit.xml").getroot()
    (suite,) = root
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == ["metric-drop", "latency-ratio", "size-ratio"]
    failure = cases["metric-drop"].find("failure")
    assert failure is not None
    assert str(failure.get("message")).endswith("fails the limit 0.3")
    held = cases["latency-ratio"]
    assert held.find("failure") is None
    assert str(held.findtext("system-out")).startswith("passed: 1.00 ×")
    assert held.get("classname") == "made.model.onnx"


def test_what_is_undecided_fails_in_junit_only_if_strict(here: Path) -> None:
    for strict in (False, True):
        files = GateFiles(junit=Path("junit.xml"))
        assert gate(files, GateLimits(metric_drop=0.85, strict=strict)) is not strict
        (suite,) = Tree.parse(here / "junit.xml").getroot()
        assert suite.get("failures") == str(int(strict))


def test_a_gate_that_cannot_write_all_leaves_no_junit(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        gate(GateFiles(junit=Path("junit.xml"), markdown=Path("file/gate.md")))
    assert not (here / "junit.xml").exists()


def test_junit_is_well_formed_whatever_the_names_are(here: Path) -> None:
    made_run(here / "candidate", results(13), changes={"name": 'a<b>&"\x01\n]]>'})
    gate(GateFiles(junit=Path("junit.xml")))
    (suite,) = Tree.parse(here / "junit.xml").getroot()
    assert suite[0].get("classname") == 'a<b>&"\\x01\\n]]>.model.onnx'


def test_markdown(here: Path) -> None:
    gate(GateFiles(markdown=Path("gate.md"), history=Path("h.jsonl"), label="a|b"))
    assert (here / "gate.md").read_text(encoding="utf-8") == GOLDEN.read_text(encoding="utf-8")


def test_the_jobs_summary_is_added_to(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = here / "summary.md"
    summary.write_text("of another step\n")
    monkeypatch.setenv(SUMMARY, str(summary))
    gate(GateFiles())
    gate(GateFiles(markdown=Path("gate.md")))
    markdown = (here / "gate.md").read_text(encoding="utf-8")
    assert summary.read_text(encoding="utf-8") == f"of another step\n{markdown}{markdown}"


def test_a_summary_that_cannot_be_written_is_said(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SUMMARY, str(here / "base" / "report.json" / "summary.md"))
    with pytest.raises(SpecError, match="cannot be written"):
        gate(GateFiles())


def test_the_same_gate_writes_the_same_bytes(here: Path) -> None:
    written = []
    for _ in range(2):
        gate(GateFiles(junit=Path("junit.xml"), markdown=Path("gate.md")))
        written.append([(here / n).read_bytes() for n in ("junit.xml", "gate.md")])
    assert written[0] == written[1]
