"""Full disks, foreign folders and other runs: a message, and nothing half-written."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
from click.testing import CliRunner

from compressor.cli.application import application
from compressor.errors import ExitCode, InputError, SpecError
from compressor.exporters.archive import unpacking
from compressor.files import settle
from compressor.lab.inspect.contents import RunContents
from compressor.lab.inspect.path import inspect_path
from compressor.models.onnx import carrier as onnx_carrier
from compressor.report.result import check_free
from compressor.run import execute
from compressor.run.store import Store
from compressor.run.timing import timing
from tests.compressor.spine_plugins import in_another_process
from tests.compressor.tiny_project import Project, onnx_project

FULL = "is full (No space left on device); free some space and run the same command again"


def three_steps(project: Project) -> Project:
    project.spec["passes"] = [{"pass": "nudge", "factor": 1.5}, {"pass": "fuse"}]
    project.spec["exports"] = [{"format": "onnx"}, {"format": "safetensors"}]
    project.spec["limits"] = dict.fromkeys(("metric-drop", "size-ratio", "latency-ratio"))
    return project


class Disk:
    """Counts how often a file is moved into place, and is full from some time on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.moves = 0
        self.full_from: int | None = None
        move = Path.replace

        def replace(path: Path, target: Path) -> Path:
            self.moves += 1
            if self.full_from is not None and self.moves > self.full_from:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return move(path, target)

        monkeypatch.setattr(Path, "replace", replace)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_disk_that_fills_up_at_any_time(
    tmp_path: Path, spine: None, step: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(timing, "_LEAST_OPENINGS", 1)  # what models take does not matter here
    disk = Disk(monkeypatch)
    whole = three_steps(onnx_project(tmp_path / "whole"))
    whole.run()
    for full_from in range(disk.moves - 1, -1, -step):
        project = three_steps(onnx_project(tmp_path / str(full_from)))
        disk.moves, disk.full_from = 0, full_from
        with pytest.raises(InputError) as caught:
            project.run()
        disk.full_from = None
        assert FULL in str(caught.value)
        assert caught.value.exit_code is ExitCode.BAD_INPUT
        assert not list(project.output.rglob(".staging-*"))
        settle(project.output)
        assert project.artifacts() in ({}, whole.artifacts())  # nothing, or all of it
        if full_from % 6 < step:
            assert project.run().exit_code is ExitCode.DONE
            assert project.artifacts() == whole.artifacts()


class Killed(BaseException):
    """The process is gone; nothing catches it, and nothing is tidied up."""


def test_a_run_that_is_killed_while_it_replaces_another_leaves_one_of_them(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    project = three_steps(on_onnx)
    project.run()
    moves = publishing_moves(project, monkeypatch)
    assert moves > 6
    for number in (0, 1, moves // 2, moves - 1):
        project.spec["passes"][0]["factor"] = 1.5 + 0.1 * number
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            kill_at(number, patch)
            with pytest.raises(Killed):
                project.run()
        contents = inspect_path(project.output)
        assert isinstance(contents, RunContents)
        assert {file.state for file in contents.files} == {"unchanged"}
        seen = {path.name for path in project.output.iterdir() if not path.name.startswith(".")}
        assert seen == {file.name for file in contents.files} | {"manifest.json"}


def publishing_moves(project: Project, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many files are moved when a run replaces what another has left."""
    project.spec["passes"][0]["factor"] = 3.0
    with monkeypatch.context() as patch:
        moved = kill_at(-1, patch)
        project.run()
    return len(moved)


def kill_at(number: int, patch: pytest.MonkeyPatch) -> list[Path]:
    """End the process before it moves the n-th file in the output, the store's left out."""
    moved: list[Path] = []
    move = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if ".compressor" not in Path(target).parts:
            if len(moved) == number:
                raise Killed
            moved.append(target)
        return move(path, target)

    patch.setattr(Path, "replace", replace)
    return moved


def test_a_full_disk_leaves_the_earlier_result_whole(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    project = three_steps(on_onnx)
    project.run()
    files = {p.name: p.read_bytes() for p in project.output.iterdir() if p.is_file()}
    project.spec["passes"][0]["factor"] = 3.0
    write = Path.write_text

    def full(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == "report.html":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(InputError, match="is full"):
            project.run()
    assert {p.name: p.read_bytes() for p in project.output.iterdir() if p.is_file()} == files
    project.run()
    assert (project.output / "model.onnx").read_bytes() != files["model.onnx"]


def test_fresh_deletes_nothing_behind_a_link(on_onnx: Project, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "precious").mkdir(parents=True)
    on_onnx.store.parent.mkdir(parents=True)
    on_onnx.store.symlink_to(elsewhere)
    with pytest.raises(SpecError, match="is a link, and --fresh would delete what it leads to"):
        on_onnx.run(fresh=True)
    assert (elsewhere / "precious").is_dir()
    on_onnx.run()  # results may lie on another disk


def test_a_full_disk_is_exit_code_3(on_onnx: Project, monkeypatch: pytest.MonkeyPatch):
    Disk(monkeypatch).full_from = 0
    result = CliRunner().invoke(application, ["run", str(on_onnx.path)])
    assert result.exit_code == ExitCode.BAD_INPUT
    folder = str(on_onnx.store)
    *steps, last = result.stderr.splitlines()
    assert last == f"error: folder {folder!r}: {FULL}; finished passes are kept"
    assert all(step.startswith(("plan  ", "step ")) for step in steps)


def test_a_full_temporary_folder_is_no_fault_of_the_artifact(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    """An archive is unpacked there to be measured; that ended in exit code 4."""
    on_onnx.spec["exports"] = [{"format": "archive"}]
    monkeypatch.setattr(unpacking, "disk_usage", lambda _: SimpleNamespace(free=999))
    result = CliRunner().invoke(application, ["run", str(on_onnx.path)])
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "has room for 999; free some space there" in result.stderr
    assert on_onnx.artifacts() == {}


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
from compressor.cli import main
sys.argv = ["compress", "run", "spec.yaml"]
main()
"""


@pytest.mark.slow
def test_a_file_that_the_system_does_not_let_grow(on_torch: Project, tmp_path: Path):
    """A pass's result is a safetensors file here, whose writer fails in a way of its own."""
    on_torch.spec["passes"] = [{"pass": "nudge"}]
    result = in_another_process(on_torch, tmp_path / "site", "-c", LIMITED)
    assert result.returncode == ExitCode.BAD_INPUT, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: spec.yaml:")
    assert "is full (" in result.stderr
    assert result.stderr.endswith(
        "; free some space and run the same command again; finished passes are kept\n"
    )
    assert "File too large" in result.stderr
    assert on_torch.leftovers() == []


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        pytest.param(
            "x" * 300,
            "cannot be written (File name too long); choose another output",
            id="too long",
        ),
        pytest.param(
            "/proc/self/out",
            "cannot be written (No such file or directory); choose another output",
            id="no disk",
            marks=pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc"),
        ),
    ],
)
def test_an_output_that_cannot_be_made(on_onnx: Project, output: str, reason: str):
    on_onnx.spec["output"] = output
    on_onnx.spec["model"]["onnx"] = "missing.onnx"  # nothing of it is looked at before
    result = CliRunner().invoke(application, ["run", str(on_onnx.path)])
    assert result.exit_code == ExitCode.BAD_SPEC
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert reason in result.stderr


def test_a_folder_of_somebody_else_s(on_onnx: Project):
    on_onnx.output.mkdir(parents=True)
    (on_onnx.output / "thesis.tex").write_text("my only copy")
    with pytest.raises(SpecError) as caught:
        on_onnx.run()
    assert str(caught.value) == (
        f"output {str(on_onnx.output)!r}: holds files that no run of compressor made; "
        "name another folder, empty this one, or replace files of the same names with --force "
        "(force=True in Python)"
    )
    assert [p.name for p in on_onnx.output.iterdir()] == ["thesis.tex"]


def test_a_folder_of_somebody_else_s_by_force(on_onnx: Project):
    on_onnx.output.mkdir(parents=True)
    (on_onnx.output / "thesis.tex").write_text("my only copy")
    (on_onnx.output / "model.onnx").write_text("somebody else's")
    (on_onnx.output / "manifest.json").write_text('{"outputs": [{"name": "thesis.tex"}]}')
    assert on_onnx.run(force=True).exit_code is ExitCode.DONE
    assert (on_onnx.output / "thesis.tex").read_text() == "my only copy"
    assert (on_onnx.output / "model.onnx").stat().st_size > 1000
    assert on_onnx.run().cached


def test_an_output_that_is_a_file(on_onnx: Project):
    on_onnx.output.parent.mkdir()
    on_onnx.output.write_text("x")
    with pytest.raises(SpecError, match="is a file; name a folder"):
        on_onnx.run()
    assert on_onnx.output.read_text() == "x"


@pytest.mark.parametrize("name", ["a" * 256, f"new/{'ü' * 128}/here"])
@pytest.mark.parametrize("made", [False, True])
def test_a_name_that_is_too_long_for_the_disk_is_found_by_the_plan(
    on_onnx: Project, name: str, made: bool
):
    """The plan took it; the run refused it, and blamed the disk."""
    output = on_onnx.output.parent / name
    if made:
        on_onnx.output.parent.mkdir()
    with pytest.raises(SpecError, match=r"cannot be written .File name too long.; choose another"):
        check_free(output, force=False)


def test_the_longest_name_will_do(on_onnx: Project):
    assert on_onnx.run(f"output=out/{'a' * 255}").exit_code is ExitCode.DONE


def test_an_empty_folder_is_fine(on_onnx: Project):
    on_onnx.output.mkdir(parents=True)
    assert on_onnx.run().exit_code is ExitCode.DONE


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_another_run_is_using(on_onnx: Project, fresh: bool):
    on_onnx.run()
    store = Store(on_onnx.store)
    before = {p: p.read_bytes() for p in on_onnx.output.rglob("*") if p.is_file()}
    staged = on_onnx.output / ".staging-of-the-other"
    staged.mkdir()
    with store.locked():
        with pytest.raises(SpecError) as caught:
            on_onnx.run(fresh=fresh)
        assert str(caught.value) == (
            f"output {str(on_onnx.output)!r}: is in use by another run; "
            "wait for it, or give this run another output"
        )
        assert staged.is_dir()
        assert {p: p.read_bytes() for p in on_onnx.output.rglob("*") if p.is_file()} == before
    assert on_onnx.run(fresh=fresh).exit_code is ExitCode.DONE
    assert not staged.exists()


def test_what_is_wrong_with_the_data_shows_before_any_pass(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    """A metric that fails must not cost a night of calibration."""
    (on_onnx.folder / "tiny_metric.py").write_text("def f(output, target): return output\n")
    on_onnx.spec["metric"] = "tiny_metric:f"
    on_onnx.spec["passes"] = [{"pass": "nudge"}]
    begun: list[str] = []
    monkeypatch.setattr(execute, "run_passes", lambda _: begun.append("passes"))
    with pytest.raises(InputError, match=r"metric 'tiny_metric:f': returned shape \[16, 4\] for"):
        on_onnx.run()
    assert begun == []
    assert on_onnx.leftovers() == []


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (" + torch.rand(4)", r"model: node '.*' \(RandomUniformLike\) draws random numbers"),
        (
            ".repeat(1, 2 - torch.compiler.is_exporting())",
            "module TinyNet: its graph returns other values for output 'output'; ",
        ),
    ],
)
def test_a_module_that_lowers_to_something_else(on_torch: Project, added: str, message: str):
    source = (on_torch.folder / "tiny_net.py").read_text()
    noisy = source.replace("self.fc(x.mean((2, 3)))", f"self.fc(x.mean((2, 3))){added}")
    assert noisy != source
    (on_torch.folder / "tiny_net.py").write_text(noisy)
    with pytest.raises(InputError, match=message):
        on_torch.run()
    assert on_torch.leftovers() == []


def test_a_module_that_does_not_take_the_samples(on_torch: Project):
    """What a module raised while its graph was compared was an internal error."""
    source = (on_torch.folder / "tiny_net.py").read_text()
    asks = "self.fc(x.mean((2, 3)) if torch.compiler.is_exporting() else x.reshape(-1, 77777))"
    picky = source.replace("self.fc(x.mean((2, 3)))", asks)
    assert picky != source
    (on_torch.folder / "tiny_net.py").write_text(picky)
    with pytest.raises(InputError, match="module TinyNet on the first samples: raised RuntimeErr"):
        on_torch.run()
    assert on_torch.leftovers() == []


def test_an_onnx_file_whose_upgrade_computes_something_else(
    on_onnx: Project, monkeypatch: pytest.MonkeyPatch
):
    """The file as it is and the graph that passes work on are run side by side."""
    original = onnx_carrier.make_plain

    def spoiled(model: ir.Model) -> None:
        original(model)
        bias = model.graph.initializers["fc.bias"]
        assert bias.const_value is not None
        bias.const_value = ir.tensor(bias.const_value.numpy() + 1, name="fc.bias")

    monkeypatch.setattr(onnx_carrier, "make_plain", spoiled)
    with pytest.raises(InputError) as caught:
        on_onnx.run()
    assert "its graph returns other values for output 'logits'" in str(caught.value)
    assert not on_onnx.leftovers()
