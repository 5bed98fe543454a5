"""Exit codes and messages, word for word."""

import errno
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from compressor.cli.application import application
from compressor.errors import ExitCode

SPEC = """\
version: 1
name: tiny
model:
  factory: nowhere:build
passes:
  - pass: fuse
  - pass: quantize-static
    activations: {observer: mse}
exports:
  - format: onnx
"""

Edit = Callable[[str], str]


def replaced(old: str, new: str) -> Edit:
    assert old in SPEC
    return lambda text: text.replace(old, new)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(application, arguments)


def plan(text: str, *settings: str) -> Result:
    Path("spec.yaml").write_text(text, encoding="utf-8")
    return invoke("plan", "spec.yaml", *(word for s in settings for word in ("--set", s)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            replaced("name: tiny", "name: tiny\nexport: []"),
            "error: spec.yaml:3: export: is not a known key; did you mean 'exports'?\n",
        ),
        (
            replaced("- pass: fuse", "- pass: fuse\n    batchnorm: true"),
            "error: spec.yaml:7: passes.0.batchnorm: is not a known key; "
            "did you mean 'batch-norm'?\n",
        ),
        (
            replaced("name: tiny", "name: tiny\nseed: one"),
            'error: spec.yaml:3: seed: is "one"; it must be a valid integer\n',
        ),
        (
            replaced("- pass: fuse", "- pass: fusse"),
            "error: spec.yaml:6: pass 'fusse': is not known; did you mean 'fuse'?\n",
        ),
        (
            replaced("observer: mse", "observer: entropie"),
            'error: spec.yaml:8: passes.1.activations.observer: is "entropie"; '
            "did you mean 'entropy'?\n",
        ),
        (
            replaced("format: onnx", "format: onxx"),
            "error: spec.yaml:10: exporter 'onxx': is not known; did you mean 'onnx'?\n",
        ),
        (
            replaced("name: tiny\n", ""),
            "error: spec.yaml: name: is missing; add name\n",
        ),
        (
            replaced("passes:", "data:\n  calibration: {npz: gone.npz}\npasses:"),
            "error: spec.yaml:6: data.calibration.npz: 'FOLDER/gone.npz' does not exist; "
            "correct the path\n",
        ),
        (
            replaced("passes:", "data:\n  calibration: {nzp: gone.npz}\npasses:"),
            "error: spec.yaml:6: data.calibration: names no source; did you mean 'npz'?\n",
        ),
        (
            replaced("- pass: fuse", "- {pass: fuse"),
            "error: spec.yaml:7: YAML: expected ',' or '}', but got ':'; "
            "check indentation, brackets and quotes\n",
        ),
        (
            lambda _: "just words\n",
            "error: spec.yaml:1: spec 'spec.yaml': is not a mapping of keys; see compress init\n",
        ),
        (
            lambda _: "",
            "error: spec.yaml:1: spec 'spec.yaml': is not a mapping of keys; see compress init\n",
        ),
        (
            replaced("factory: nowhere:build", "factory: nowhere:build\n  onnx: m.onnx"),
            'error: spec.yaml:3: model: is {"factory": "nowhere:build", "onnx": "m.onnx"}; '
            "set either onnx, or factory and checkpoint, not both\n",
        ),
    ],
)
def test_wrong_specs(edit: Edit, message: str, folder: Path) -> None:
    result = plan(edit(SPEC))
    assert result.stderr.replace(str(folder), "FOLDER") == message
    assert (result.exit_code, result.stdout) == (2, "")


def test_independent_errors_have_a_line_each() -> None:
    wrong = SPEC.replace("pass: fuse", "pass: fuze").replace("observer: mse", "obsever: mse")
    result = plan(wrong)
    assert result.exit_code == 2
    assert result.stderr == (
        "error: spec.yaml:6: pass 'fuze': is not known; did you mean 'fuse'?\n"
        "error: spec.yaml:8: passes.1.activations.obsever: is not a known key; "
        "did you mean 'observer'?\n"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed", "error: --set seed: is not key=value; write passes.1.epochs=5\n"),
        ("passes.7.bits=4", "error: --set passes.7.bits=4: passes.7 does not exist; "),
        ("seed=[", "error: --set seed=[: has a malformed value; quote it\n"),
        (
            "seed=-1",
            "error: --set seed=-1: seed: is -1; it must be greater than or equal to 0\n",
        ),
    ],
)
def test_wrong_settings(setting: str, message: str) -> None:
    result = plan(SPEC, setting)
    assert result.stderr.startswith(message)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_missing_spec(command: str) -> None:
    result = invoke(command, "gone.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: spec 'gone.yaml': does not exist; "
        "give the path of a YAML file; compress init writes one\n"
    )


def test_a_folder_or_a_binary_as_spec(folder: Path) -> None:
    assert invoke("plan", ".").exit_code == 2
    (folder / "binary.yaml").write_bytes(bytes(range(256)))
    result = invoke("plan", "binary.yaml")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: spec 'binary.yaml': is not text in UTF-8 (")


def test_a_factory_that_does_not_import() -> None:
    result = plan(SPEC)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: spec.yaml:4: model.factory: 'nowhere' does not import (ModuleNotFoundError: "
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "error: no such option '--bogus'"),
        (["plan"], "error: missing argument 'SPEC'; see compress plan --help\n"),
        (["bogus"], "error: no such command 'bogus'"),
        (["passes", "fusse"], "error: pass 'fusse': is not known; did you mean 'fuse'?\n"),
        (["exporters", "onxx"], "error: exporter 'onxx': is not known; did you mean 'onnx'?\n"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.stderr.startswith(message)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def command(monkeypatch: pytest.MonkeyPatch, function: Callable[[], None]) -> None:
    """Add the command ``try``, which calls the function."""
    monkeypatch.setitem(application.commands, "try", click.Command("try", callback=function))


def test_a_failure_that_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("first line\nsecond line")

    command(monkeypatch, fail)
    line = (
        "internal error: ZeroDivisionError: first line second line; please report it; "
        "--debug shows the traceback\n"
    )
    result = invoke("try")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "", line)
    for arguments in (["--debug", "try"], ["try", "--debug"]):
        result = invoke(*arguments)
        assert result.exit_code == 3
        assert result.stderr.startswith("Traceback (most recent call last):\n")
        assert result.stderr.endswith(line)


def test_debug_shows_the_traceback_of_the_users_errors_too() -> None:
    result = invoke("plan", "gone.yaml", "--debug")
    assert result.exit_code == 2
    assert "FileNotFoundError" in result.stderr
    assert "\nerror: spec 'gone.yaml': " in result.stderr


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    command(monkeypatch, fail)
    result = invoke("try")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "interrupted\n"  # test_run_resume.py has one that resumes


def test_warnings_of_libraries_are_for_debugging_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> None:
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    command(monkeypatch, warn)
    result = invoke("try")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    # Outside of the command line's own silence the tests turn warnings into errors.
    assert "DeprecationWarning" in invoke("try", "--debug").stderr


def test_a_broken_disk_is_no_defect_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    command(monkeypatch, fail)
    result = invoke("try")
    assert result.exit_code == 3
    assert result.stderr.startswith("error: a file: cannot be used (Input/output error);")


def test_modules_of_the_current_folder_can_be_imported(folder: Path) -> None:
    (folder / "here_cli_module.py").write_text("biuld = dict\n")
    (folder / "specs").mkdir()
    text = SPEC.replace("nowhere:build", "here_cli_module:build")
    (folder / "specs" / "spec.yaml").write_text(text)
    result = invoke("plan", "specs/spec.yaml")
    assert result.exit_code == 2
    assert result.stderr.endswith("'here_cli_module' has no 'build'; did you mean 'biuld'?\n")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "closed", [pytest.param("1", marks=SLOW), pytest.param("2", marks=SLOW), "1 2"]
)
def test_a_closed_stream_changes_nothing(closed: str, tmp_path: Path) -> None:
    redirections = " ".join(f"{number}>&-" for number in closed.split())
    code = "from compressor.cli import main; main()"
    shell = f'"{sys.executable}" -c "{code}" schema {redirections}'
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert bool(done.stdout) == ("1" not in closed)


@pytest.mark.parametrize("command", [pytest.param("schema", marks=SLOW), "passes", "--help"])
def test_a_full_disk_behind_the_output_is_a_message(command: str) -> None:
    code = f"import sys; sys.argv[1:] = [{command!r}]; from compressor.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr.startswith("error: output: cannot be used (No space left on device)")


def test_an_exit_of_code_that_a_command_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command ends by its own exit code, whatever an extension makes of it."""

    def leave() -> None:
        sys.exit(0)

    command(monkeypatch, leave)
    result = invoke("try")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert result.stderr.startswith("error: file 'test_cli_failures.py', line ")
    assert "tried to end the program (SystemExit: 0)" in result.stderr


def test_a_crash_inside_a_library_says_where_it_was_called():
    crash = (
        "import faulthandler; from compressor.cli import application as cli\n"
        "cli.application.main = faulthandler._sigsegv; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", crash], capture_output=True, text=True, check=False
    )
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr
    assert "application.py" in done.stderr
