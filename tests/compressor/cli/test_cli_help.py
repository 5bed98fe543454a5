"""The command line itself: help, versions, start-up, and lists."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from compressor.cli.application import application

COMMANDS = [
    "init",
    "plan",
    "run",
    "quantize",
    "inspect",
    "tune",
    "explain",
    "bench",
    "compare",
    "gate",
    "verify",
    "unpack",
    "passes",
    "exporters",
    "schema",
    "doctor",
]
HEAVY = ["torch", "onnx", "onnx_ir", "onnxruntime", "numpy", "pydantic", "rich", "ruamel.yaml"]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_commands_come_in_the_order_of_use() -> None:
    assert application.list_commands(click.Context(application)) == COMMANDS


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str, option: str) -> None:
    result = CliRunner().invoke(application, [command, option])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: compress {command} ")
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_of_the_group_shows_whole_summaries(arguments: list[str]) -> None:
    result = CliRunner().invoke(application, arguments)
    assert result.exit_code == 0
    listed = result.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == COMMANDS
    assert not [line for line in listed if line.endswith("...")]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from compressor.cli.application import application\n"
        "try:\n"
        "    application.main(['--help'])\n"
        "except SystemExit:\n"
        f"    print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)\n"
    )
    assert python("-c", code).stderr == "[]\n"


def test_no_garbage_is_looked_for_as_the_process_ends() -> None:
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 1000, file=sys.stderr))\n"
        "from compressor.cli.application import main\n"
        "main()\n"
    )
    assert python("-c", code, "--version").stderr == "True\n"


def test_no_garbage_is_looked_for_while_libraries_are_imported() -> None:
    code = (
        "import gc\n"
        "from compressor.cli import inspect\n"
        "from compressor.cli.application import main\n"
        "shown = inspect.shown_progress\n"
        "looked = []\n"
        "gc.collect()\n"  # what came before may be looked at just now
        "gc.callbacks.append(lambda *_: looked.append(1))\n"
        "def counted(**settings):\n"
        "    import torch\n"
        "    before = len(looked)\n"
        "    with shown(**settings):\n"
        "        print(before, gc.isenabled(), len(gc.get_objects(2)) > 100_000)\n"
        "    raise SystemExit\n"
        "inspect.shown_progress = counted\n"
        "main()\n"
    )
    assert python("-c", code, "inspect", __file__).stdout == "0 True True\n"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux does")
def test_numpy_starts_no_threads_that_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # it would decide
    code = (
        "import atexit, os, sys\n"
        "def show():\n"
        "    before = len(os.listdir('/proc/self/task'))\n"
        "    import numpy as np\n"
        "    np.ones((512, 512)) @ np.ones((512, 512))\n"
        "    print(len(os.listdir('/proc/self/task')) - before, file=sys.stderr)\n"
        "atexit.register(show)\n"
        "from compressor.cli.application import main\n"
        "main()\n"
    )
    assert python("-c", code, "--version").stderr == "0\n"


def test_runs_as_a_module() -> None:
    result = python("-m", "compressor", "--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("compressor 0.")


def test_doctor_for_people_and_programs() -> None:
    text = CliRunner().invoke(application, ["doctor"])
    assert text.exit_code == 0
    assert "CPUExecutionProvider" in text.stdout
    machine = json.loads(CliRunner().invoke(application, ["doctor", "--json"]).stdout)
    assert machine["versions"]["torch"] is not None
    assert machine["cores"] >= 1
    assert {builder["name"] for builder in machine["builders"]} == {"rtx", "gpu"}


def test_passes_are_listed_with_what_they_need() -> None:
    result = CliRunner().invoke(application, ["passes"])
    assert result.exit_code == 0
    assert "does not import" not in result.stdout
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert rows["fuse"].endswith("   graph")
    assert rows["quantize-static"].endswith("   graph, run")
    listed = json.loads(CliRunner().invoke(application, ["passes", "--json"]).stdout)
    assert {"name", "summary", "needs", "problem"} == set(listed[0])
    assert [entry["name"] for entry in listed] == list(rows)[2:]


def test_one_pass_is_shown_with_nested_options() -> None:
    result = CliRunner().invoke(application, ["passes", "quantize-static"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    sections = [line.split()[0] for line in lines if line.startswith(("weights ", "layers "))]
    assert sections == ["weights", "layers"]
    assert any(re.match(r"  granularity +channel or tensor ", line) for line in lines)
    assert any("Source: " in line for line in lines)
    shown = json.loads(CliRunner().invoke(application, ["passes", "fuse", "--json"]).stdout)
    assert shown["options"][0]["key"] == "batch-norm"


def test_one_exporter_is_shown() -> None:
    result = CliRunner().invoke(application, ["exporters", "onnx"])
    assert result.exit_code == 0
    assert "opset " in result.stdout
    listed = json.loads(CliRunner().invoke(application, ["exporters", "--json"]).stdout)
    assert "onnx" in {entry["name"] for entry in listed}


def test_schema_is_one_json_document() -> None:
    result = CliRunner().invoke(application, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["$schema"].endswith("2020-12/schema")


@pytest.mark.parametrize("arguments", [["-v", "plan", "no.yaml"], ["plan", "no.yaml", "-v"]])
def test_v_is_short_for_debug(arguments: list[str]) -> None:
    result = CliRunner().invoke(application, arguments)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "Traceback" not in CliRunner().invoke(application, ["plan", "no.yaml"]).stderr


def test_q_is_short_for_quiet() -> None:
    quiet = [
        command.name
        for name in COMMANDS
        if (command := application.get_command(click.Context(application), name)) is not None
        and any("--quiet" in option.opts for option in command.params)
    ]
    assert {"run", "quantize", "gate"} <= {*quiet}
    for name in quiet:
        assert " -q, --quiet " in CliRunner().invoke(application, [str(name), "-h"]).stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("compress r", ["plain,run"]),
        ("compress run --fr", ["plain,--fresh"]),
        ("compress passes quantize-s", ["plain,quantize-static"]),
        ("compress exporters sa", ["plain,safetensors"]),
        ("compress run s", ["file,s"]),
    ],
)
def test_a_shell_completes(words: str, completed: list[str]) -> None:
    given = {
        "_COMPRESS_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = subprocess.run(
        [sys.executable, "-m", "compressor"],
        capture_output=True,
        text=True,
        env={**os.environ, **given},
        timeout=60,
        check=False,
    )
    assert result.stdout.split() == completed
    assert result.stderr == ""


def test_the_documented_line_sets_completion_up() -> None:
    given = {**os.environ, "_COMPRESS_COMPLETE": "bash_source"}
    command = [sys.executable, "-m", "compressor"]
    script = subprocess.run(command, capture_output=True, env=given, timeout=60, check=False).stdout
    shell = subprocess.run(
        ["bash", "-c", script.decode() + "\ncomplete -p compress"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "_compress_completion compress" in shell.stdout
