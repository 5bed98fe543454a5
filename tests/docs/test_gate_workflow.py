"""The workflow that the guide shows gates a project, step by step as a CI service runs it."""

import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from compressor.cli.application import application
from compressor.report.gate_files import SUMMARY
from tests.compressor.conftest import spine  # noqa: F401 - a fixture
from tests.compressor.tiny_project import onnx_project
from tests.docs.test_docs import ALL_BLOCKS

WORSE = {"pass": "nudge", "factor": -1.0}


def steps() -> list[list[str]]:
    """Return the commands of the workflow that are ours."""
    (block,) = (b for b in ALL_BLOCKS if b.page.name == "gate.md" and b.language == "yml")
    workflow = YAML(typ="safe").load(block.text)
    (job,) = workflow["jobs"].values()
    assert {"name", "on"} <= workflow.keys()
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    return [arguments for name, *arguments in commands if name == "compress"]


@pytest.mark.usefixtures("spine")
def test_the_workflow_passes_what_is_equal_and_fails_what_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = onnx_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SUMMARY, "summary.md")
    project.spec["output"] = "out/my-model"
    project.run()
    shutil.copytree("out/my-model", "baseline", ignore=shutil.ignore_patterns("model.onnx", ".*"))
    run, gate = steps()
    assert run[0] == "run"
    for passes, code in (([], 0), ([WORSE], 1)):
        project.spec["passes"] = passes
        assert project.path.is_file()
        assert CliRunner().invoke(application, run).exit_code == code
        assert CliRunner().invoke(application, gate).exit_code == code
        assert Path("gate.xml").is_file()
    summary = Path("summary.md").read_text(encoding="utf-8")
    assert summary.index("Gate unknown") < summary.index("Gate failed")
