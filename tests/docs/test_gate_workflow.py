"""The workflow that the guide shows gates a project, step by step as a CI service runs it."""

import re
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
    block, _ = (b for b in ALL_BLOCKS if b.page.name == "gate.md" and b.language == "yml")
    workflow = YAML(typ="safe").load(block.text)
    (job,) = workflow["jobs"].values()
    assert {"name", "on"} <= workflow.keys()
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    return [arguments for name, *arguments in commands if name == "compress"]


def test_other_services_run_the_same_commands() -> None:
    on_page = [b for b in ALL_BLOCKS if b.page.name == "gate.md"]
    _, gitlab = (b for b in on_page if b.language == "yml")
    (job,) = YAML(typ="safe").load(gitlab.text).values()
    words = [shlex.split(command) for command in job["script"]]
    assert [arguments for name, *arguments in words if name == "compress"] == steps()
    (jenkins,) = (b for b in on_page if b.language == "groovy")
    words = [shlex.split(command) for command in re.findall(r"sh '([^']*)'", jenkins.text)]
    ours = [arguments for name, *arguments in words if name == ".venv/bin/compress"]
    assert ours == steps()
    assert jenkins.text.count("{") == jenkins.text.count("}")
    _, gate = steps()
    junit = gate[gate.index("--junit") + 1]
    assert job["artifacts"]["reports"]["junit"] == junit
    assert f"junit '{junit}'" in jenkins.text


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
    assert summary.index("Gate passed") < summary.index("Gate failed")
